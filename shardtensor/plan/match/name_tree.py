"""The names of a model as a tree, and the names that each line of a plan matches: a tensor has one rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.line import Line, pattern_place, statement
from shardtensor.plan.match.patterns import Segment, pattern

Way = tuple[Segment, ...]


class _Node:
    __slots__ = ("below", "is_module", "order", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.below = _NOTHING
        self.is_module = False
        self.order = -1  # of a tensor, in the model


_NOTHING: dict[str, _Node] = {}  # shared by all leaves; always empty


class NameTree:
    """Names of tensors, and paths of modules.

    Example:
        >>> tree = NameTree(["layers.0.q.weight", "layers.1.q.weight", "norm.weight"], ["", "layers.0", "layers.1"])
        >>> tree.tensors("layers.*"), tree.modules("**.1")
        (('layers.0.q.weight', 'layers.1.q.weight'), ('layers.1',))
    """

    def __init__(self, tensors: Iterable[str], modules: Iterable[str]) -> None:
        self._root = _Node("")
        self._nodes = {"": self._root}
        self._names = tuple(tensors)
        self._kept: dict[tuple[str, bool], tuple[str, ...]] = {}
        self._begins: dict[Way, bool] = {}
        for order, name in enumerate(self._names):
            self._node(name).order = order
        for path in modules:
            self._node(path).is_module = True

    def _node(self, path: str) -> _Node:
        new = []
        while (node := self._nodes.get(path)) is None:
            new.append(path)
            path = path.rpartition(".")[0]
        for below in reversed(new):
            if node.below is _NOTHING:
                node.below = {}
            node.below[below.rpartition(".")[2]] = self._nodes[below] = node = _Node(below)
        return node

    def tensors(self, text: str) -> tuple[str, ...]:
        """Return the tensors that a pattern matches, and all below modules that it matches, in the model's order."""
        key = text, True
        if key not in self._kept:
            orders: set[int] = set()
            for top in self._found(pattern(text).segments, is_below=True):
                stack = [top]
                while stack:
                    node = stack.pop()
                    if node.order >= 0:
                        orders.add(node.order)
                    stack += node.below.values()
            self._kept[key] = tuple(self._names[order] for order in sorted(orders))
        return self._kept[key]

    def modules(self, text: str) -> tuple[str, ...]:
        """Return the modules that a pattern matches."""
        key = text, False
        if key not in self._kept:
            self._kept[key] = tuple(
                dict.fromkeys(node.path for node in self._found(pattern(text).segments) if node.is_module)
            )
        return self._kept[key]

    def has(self, way: Way) -> bool:
        """Whether the segments of a pattern match the beginning of some name."""
        if way not in self._begins:
            self._begins[way] = next(self._found(way, is_below=True), None) is not None
        return self._begins[way]

    def _found(self, way: Way, is_below: bool = False) -> Iterator[_Node]:
        """Yield the nodes that a pattern matches (`is_below`: not those below one that was found)."""
        is_deep = any(segment.is_deep for segment in way)
        texts = [segment.literal for segment in way]
        seen: set[tuple[int, int]] = set()
        stack = [(self._root, 0)]
        while stack:
            node, at = stack.pop()
            if is_deep:  # else there is one way to each node
                if (id(node), at) in seen:
                    continue
                seen.add((id(node), at))
            if at == len(way):
                yield node
                continue
            segment, text = way[at], texts[at]
            if text is not None:
                child = node.below.get(text)
                stack += [] if child is None else [(child, at + 1)]
            elif segment.is_deep:
                if not (is_below and at + 1 == len(way)):  # else this node is found, and all below it with it
                    stack += [(child, at) for child in reversed(node.below.values())]
                stack.append((node, at + 1))
            else:
                matching = [child for name, child in node.below.items() if segment.captures(name) is not None]
                stack += [(child, at + 1) for child in reversed(matching)]


@attrs.frozen(eq=False)
class Matches:
    """The names that every line matches.

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
    """Compares the lines that match one name: E302 and W302."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._pairs: dict[object, str] = {}

    def winner(self, name: str, lines: Sequence[Line], meanings: Mapping[int, Any], what: str = "") -> Line | None:
        """Return the line to use for a name; None if two disagree.

        Args:
            meanings: by a line's id, its value; equal if lines agree.
            what: the side or attribute of a module; empty for a tensor.
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
            return  # reported for the tensors already
        self._pairs.setdefault(frozenset(keys), what)
        subject = f"`{what}` of `{name}`" if what else f"`{name}`"
        place = pattern_place(other)
        where = f"the other rule is {place} `{place.text}`" if place is not None else ""
        code, how, fix = "W302", "agree", "drop one of them, or narrow its pattern"
        if not agrees:
            code, how, fix = "E302", "disagree", "narrow one pattern"
        rule = "a value passes a module in one way" if what else "one tensor, one rule"
        self.findings.append(Finding(
            code, f"{subject} is matched by two rules that {how}", pattern_place(line),
            f"{rule}: order in the file never decides", fix,
            (where or f"the rules are {_rule_text(line)} and {_rule_text(other)}",), name,
        ))  # fmt: skip


def _rule_text(line: Line) -> str:
    """Return a rule made in Python as a line of a plan."""
    side = "" if line.kind == "tensor" else f"{line.pattern and ' '}{line.kind} {line.name}".rstrip()
    return f"`{line.pattern}{side}: {line.value}`"


def _place(line: Line) -> int:
    return line.origin.span[0] if line.origin is not None else 0
