"""Which line of a plan speaks for which tensor and which module: one tensor, one rule, whatever the order of lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.places import pattern_place, statement
from shardtensor.plan.line import Line
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.match.patterns import Deep, pattern


@attrs.frozen(eq=False)
class Matches:
    """What every line stands for.

    Attributes:
        names: the tensors of each line of the kind ``"tensor"``, the modules of the others, by the line's id.
        by_tensor: the lines of each tensor.
        by_module: the lines of each module.
    """

    names: Mapping[int, tuple[str, ...]]
    by_tensor: Mapping[str, Sequence[Line]]
    by_module: Mapping[str, Sequence[Line]]


def match_lines(lines: Iterable[Line], tree: NameTree) -> Matches:
    """Match each line to the names of a model."""
    names: dict[int, tuple[str, ...]] = {}
    by_tensor: dict[str, tuple[Line, ...]] = {}
    by_module: dict[str, tuple[Line, ...]] = {}
    for line in lines:
        if line.module and not tree.modules(line.module):
            names[id(line)] = ()
            continue
        if line.kind == "tensor":
            found, speakers = tree.tensors(line.pattern), by_tensor
        else:
            found, speakers = tree.modules(line.pattern), by_module
        names[id(line)] = found
        alone = (line,)
        for name in found:
            others = speakers.get(name)
            speakers[name] = alone if others is None else others + alone
    return Matches(names, by_tensor, by_module)


class Disputes:
    """Collects what lines say of one thing and finds E302 and W302."""

    def __init__(self, matches: Matches, tree: NameTree) -> None:
        self.findings: list[Finding] = []
        self._matches = matches
        self._tree = tree
        self._pairs: dict[object, str] = {}

    def winner(self, name: str, lines: Sequence[Line], meanings: Mapping[int, Any], what: str = "") -> Line | None:
        """The line that speaks for a name; None when two disagree.

        Args:
            meanings: by a line's id, what it says, equal where lines agree.
            what: the side or attribute of a module that is spoken of; empty for a tensor.
        """
        last = max(lines, key=_place)
        for other in (line for line in lines if line is not last):
            agrees = meanings[id(other)] == meanings[id(last)]
            self._dispute(name, last, other, agrees, what)
            if not agrees:
                return None
        return lines[0]

    def _dispute(self, name: str, line: Line, other: Line, agrees: bool, what: str) -> None:
        keys = statement(line.origin, line), statement(other.origin, other)
        if what and self._pairs.get(frozenset(keys)) == "":
            return  # told of the tensors already
        self._pairs.setdefault(frozenset(keys), what)
        said = f"`{what}` of `{name}`" if what else f"`{name}`"
        place = pattern_place(other)
        where = f"the other rule is {place} `{place.text}`" if place is not None else ""
        if agrees:
            fault, fix = f"{said} is matched by two rules that agree", "drop one of them, or narrow its pattern"
        else:
            fault = f"{said} is matched by two rules that disagree"
            only = self._only(line, other)
            fix = "narrow one pattern" + (f" (`{only}`)" if only else "")
        self.findings.append(
            Finding(
                "W302" if agrees else "E302",
                fault,
                pattern_place(line),
                "one tensor, one rule: order in the file never decides"
                if not what
                else "a value passes a module in one way: order in the file never decides",
                fix,
                (where or f"the rules are {_said(line)} and {_said(other)}",),
                name,
            )
        )

    def _only(self, line: Line, other: Line) -> str:
        """A segment of a pattern that stands for what `line` matches and `other` does not; empty if too long."""
        head = line.module or line.pattern
        segments = pattern(head).segments
        theirs = set(self._matches.names[id(other)])
        if not segments or any(isinstance(segment, Deep) for segment in segments):
            return ""
        for at in reversed(range(len(segments))):
            words = dict.fromkeys(name.split(".")[at] for name in self._matches.names[id(line)] if name not in theirs)
            both = {name.split(".")[at] for name in self._matches.names[id(line)] if name in theirs}
            if words and not both & set(words):  # here they part
                return "" if len(words) > 3 else next(iter(words)) if len(words) == 1 else f"{{{','.join(words)}}}"
        return ""


def _said(line: Line) -> str:
    """A rule made in Python, as a line of a plan."""
    side = "" if line.kind == "tensor" else f"{line.pattern and ' '}{line.kind} {line.name}".rstrip()
    return f"`{line.pattern}{side}: {line.value}`"


def _place(line: Line) -> tuple[int, int]:
    return (-line.depth, line.origin.span[0]) if line.origin is not None else (-line.depth, 0)
