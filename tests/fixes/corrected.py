"""Cases of texts: something is found in one, and each way out says how to write it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import attrs

from fixes.case import Case
from shardtensor.errors import SpecError
from shardtensor.plan.findings.finding import Finding
from shardtensor.spec.parse import parse_spec

INSTEAD = re.compile(r"(?:the nearest pattern is this one: )?did you mean `([^`]+)`\?|(?:write|use) `([^`]+)`")
"""A way out that says what to write in the place of what is marked."""


@attrs.frozen
class Found:
    """What is found in a text: `what` is its code and the fault, `span` the characters that are marked."""

    what: str
    span: tuple[int, int] | None
    fix: str
    shown: str

    def moved(self, by: int) -> Found:
        """The same in a text whose characters are counted otherwise."""
        return attrs.evolve(self, span=self.span and (self.span[0] + by, self.span[1] + by))


Look = Callable[[str], Iterable[Found]]
Right = str | Callable[[], Iterable[Found]]
"""The text that a way out makes, or what else is looked at then."""


def text_case(look: Look, wrong: str, ways: Mapping[str, Right] | None = None, code: str = "") -> Case:
    """The case of one text.

    Args:
        look: finds what is wrong with a text.
        ways: words of the way out, and the text that they make; by itself where it says what to write instead.
        code: of what is followed, the first found with a way out; of all, without one.
    """
    ways = ways or {}

    def first() -> Found:
        return next(found for found in look(wrong) if found.fix and found.what.startswith(code))

    def go_wrong() -> None:
        raise SpecError(first().shown)

    def go_on() -> None:
        found, before = first(), {each.what for each in look(wrong)}
        for right in _rights(wrong, found, ways):
            after = {each.what for each in (look(right) if isinstance(right, str) else right())}
            assert found.what not in after, f"{found.what} is found still, in {right!r}"
            new = {what for what in after - before if what.startswith("E")}
            assert not new, f"in their place: {new}, of {right!r}"

    return Case(go_wrong, {next(iter(ways), ""): go_on}, mesh="")


def _rights(text: str, found: Found, ways: Mapping[str, Right]) -> list[Right]:
    for words in ways:
        assert words in found.fix, f"{words!r} is not in {found.fix!r}"
    if ways:
        return [*ways.values()]
    said = INSTEAD.fullmatch(found.fix)
    assert said is not None and found.span is not None, found.fix
    word, before = said[1] or said[2], text[: found.span[0]]
    side = word.partition(": ")[0] + ": "
    if before.endswith(side):  # what is marked stands after it
        word = word.removeprefix(side)
    return [before + word + text[found.span[1] :]]


def in_spec(text: str) -> list[Found]:
    """What is wrong with the text of a spec."""
    try:
        parse_spec(text)
    except SpecError as error:
        return [of_error(error)]
    return []


def of_error(error: SpecError) -> Found:
    """The error of a text."""
    return Found(f"{error.code} {error.fault}", error.parts[1], dict(error.rows).get("fix", ""), str(error))


def of_findings(findings: Iterable[Finding]) -> list[Found]:
    """Findings of a plan, but for notes."""
    return [
        Found(f"{each.code} {each.fault}", each.origin.span if each.origin is not None else None, each.fix, str(each))
        for each in findings
        if each.severity != "note"
    ]
