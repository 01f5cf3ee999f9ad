"""Patterns of a plan that stand for nothing, and styles that stand before what is no module."""

from __future__ import annotations

from itertools import islice, product

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.findings.places import pattern_place, segment_place, statement, style_note
from shardtensor.plan.line import Line
from shardtensor.plan.match.matching import Matches
from shardtensor.plan.match.name_tree import NameTree, Way
from shardtensor.plan.match.patterns import Deep, OneOf, Segment, pattern
from shardtensor.plan.plan import Plan


@attrs.frozen(eq=False)
class Nothing:
    """A pattern, or one alternative in its braces, that stands for nothing.

    Attributes:
        at: the number of the segment that it is about.
        words: what the segment stands for in vain.
        text: as it is written, and where.
    """

    line: Line
    segments: Way
    at: int
    words: tuple[str, ...]
    text: str
    place: Origin | None
    finding: Finding


def unused(plan: Plan, tree: NameTree, matches: Matches) -> tuple[list[Nothing], list[Finding], set[str]]:
    """W301 for rules and W303 for alternatives that stand for nothing; E303 for what stands before no module.

    Also the tensors before which a style stands, so that nobody says that no rule matches them.
    """
    nothing: list[Nothing] = []
    findings: list[Finding] = []
    told: set[object] = set()
    spoken: set[str] = set()
    for line in plan.lines:
        key = statement(line.origin, line)
        module = _missing_module(line, tree)
        if module is not None and tree.tensors(module):
            if key not in told:
                findings.append(_no_module(line, module, tree))
            told.add(key)
            spoken.update(tree.tensors(module))
        elif not line.is_optional and (module is not None or not matches.names[id(line)]):
            each = _rule(line, line.pattern if module is None else module, tree)
            missing = each.segments[: each.at + 1]
            if key not in told and missing not in told:
                nothing.append(each)
            told |= {key, missing}
    nothing += _alternatives(plan, tree, {each.text for each in nothing})
    return nothing, findings, spoken


def _missing_module(line: Line, tree: NameTree) -> str | None:
    """The pattern of modules that a line needs and the model lacks."""
    needed = [line.module] * bool(line.module) + [line.pattern] * (line.kind != "tensor")
    return next((text for text in needed if not tree.modules(text)), None)


def _rule(line: Line, head: str, tree: NameTree) -> Nothing:
    segments = pattern(head).segments
    at = next((at for at in range(len(segments)) if not tree.has(segments[: at + 1])), len(segments) - 1)
    word = str(segments[at]) if segments else ""
    is_inside = head != line.module and line.origin is not None and line.origin.through is not None
    place = line.origin if is_inside else segment_place(line, word)  # what a style says has no pattern in the plan
    notes = style_note(line.origin, "entry") if is_inside else ()
    is_whole = at == len(segments) - 1
    what = "block" if not is_whole else "rule" if line.kind == "tensor" or line.module else line.kind
    shown = ".".join(map(str, segments[: at + 1])) if not is_whole else head
    finding = Finding(
        "W301", f"this {what} matches nothing: `{shown}`", place,
        "the model has no such name; a plan that says more than the model has is often a slip",
        "correct the pattern, or write `optional` before it", notes,
    )  # fmt: skip
    words = _words(segments[at]) if segments else ()
    return Nothing(line, segments, at, words, word, place, finding)


def _no_module(line: Line, head: str, tree: NameTree) -> Finding:
    what = "a style or a block" if line.module else f"`{line.kind} {line.name}`".replace(" `", "`")
    name = tree.tensors(head)[0]
    module, _, leaf = name.rpartition(".")
    fix = f"write a layout for the tensor, such as `[tp, -]`; or name the module `{module}`, without `.{leaf}`"
    return Finding(
        "E303", f"{what} stands before `{head}`, which is no module", pattern_place(line),
        f"{name} is a tensor", fix, (), name,
    )  # fmt: skip


def _alternatives(plan: Plan, tree: NameTree, told: set[str]) -> list[Nothing]:
    """Alternatives in braces with which no name of the model begins."""
    found: list[Nothing] = []
    optional: dict[Way, bool] = {}
    first: dict[Way, Nothing] = {}
    for line in plan.lines:
        segments = pattern(line.pattern).segments if "{" in line.pattern else ()
        for at, segment in enumerate(segments):
            for i, part in enumerate(() if isinstance(segment, Deep) else segment.parts):
                if not isinstance(segment, Segment) or not isinstance(part, OneOf) or len(part.options) < 2:
                    continue
                for option in part.options:
                    one = Segment((*segment.parts[:i], OneOf((option,)), *segment.parts[i + 1 :]))
                    key = (*segments[:at], one)
                    if key in optional:
                        optional[key] &= line.is_optional
                        continue
                    optional[key] = line.is_optional
                    if not tree.has(key) and tree.has(segments[: at + 1]):
                        first[key] = _alternative(line, segments, at, one, option)
    found += [each for key, each in first.items() if not optional[key] and each.text not in told]
    return found


def _alternative(line: Line, segments: Way, at: int, one: Segment, option: str) -> Nothing:
    text = str(segments[at])
    place = segment_place(line, text)
    said = f"`{option}`" if option else "the empty alternative"
    finding = Finding(
        "W303", f"{said} in the braces of `{text}` matches nothing", place,
        "no name of the model has it there", "correct it, or drop it from the braces",
    )  # fmt: skip
    return Nothing(line, segments, at, _words(one), option, place, finding)


def _words(segment: Segment | Deep) -> tuple[str, ...]:
    """The words that a segment without stars stands for."""
    if isinstance(segment, Deep):
        return ()
    choices = []
    for part in segment.parts:
        if isinstance(part, OneOf):
            choices.append(part.options)
        elif (text := Segment((part,)).literal) is not None:
            choices.append((text,))
        else:
            return ()
    return tuple("".join(words) for words in islice(product(*choices), 64))
