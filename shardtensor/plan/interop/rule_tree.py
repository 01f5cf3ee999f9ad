"""Rules of full names, written as blocks that nest: what a hand would write of a flat list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import attrs

INDENT = "    "
_OPTIONAL = "optional "


@attrs.define
class _Node:
    rules: tuple[str, ...] = ()
    word: str = ""
    below: dict[str, _Node] = attrs.field(factory=dict)


def rule_tree(rules: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a plan that give each pattern its rules.

    A rule that starts with ``use`` is an entry of the pattern's block. Siblings of the same rules share a line. A
    pattern may have the word ``optional`` before it.

    Example:
        >>> rules = {"a.b.q_proj": ["x(tp)"], "a.b.k_proj": ["x(tp)"], "a.b.norm": ["replicate"], "c": ["use h()"]}
        >>> print("\\n".join(rule_tree(rules)))
        a.b {
            {q,k}_proj: x(tp)
            norm: replicate
        }
        c {
            use h()
        }
    """
    root = _Node()
    for pattern, said in rules.items():
        node = root
        is_optional = pattern.startswith(_OPTIONAL)
        for segment in pattern.removeprefix(_OPTIONAL).split("."):
            node = node.below.setdefault(segment, _Node())
        node.rules, node.word = tuple(said), _OPTIONAL if is_optional else ""
    return list(_lines(root, ""))


def _lines(node: _Node, indent: str) -> Iterator[str]:
    done: set[str] = set()
    for name, child in node.below.items():
        if name in done:
            continue
        if _is_plain_leaf(name, child):
            alike = [other for other, its in node.below.items() if its == child and _is_plain_leaf(other, its)]
            done |= set(alike)
            name = _together(alike)
        while not child.rules and len(child.below) == 1:
            ((deeper, child),) = child.below.items()
            name = f"{name}.{deeper}"
        uses = [rule for rule in child.rules if rule.startswith("use ")]
        yield from (f"{indent}{child.word}{name}: {rule}" for rule in child.rules if rule not in uses)
        if child.below or uses:
            yield f"{indent}{name} {{"
            yield from (f"{indent}{INDENT}{rule}" for rule in uses)
            yield from _lines(child, indent + INDENT)
            yield f"{indent}}}"


def _is_plain_leaf(name: str, node: _Node) -> bool:
    return "*" not in name and not node.below and not any(rule.startswith("use ") for rule in node.rules)


def _together(names: Sequence[str]) -> str:
    """One pattern for several names: what they end in after the last ``_`` is written once."""
    if len(names) == 1:
        return names[0]
    ends = {re.search(r"(_[A-Za-z0-9]+)?$", name)[0] for name in names}  # type: ignore[index]
    end = ends.pop() if len(ends) == 1 else ""
    return "{" + ",".join(name.removesuffix(end) for name in names) + "}" + end
