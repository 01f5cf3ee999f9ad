"""Syntax trees back to text: canonical spacing, no brackets that say nothing, modifiers and suffixes in one order."""

from __future__ import annotations

import json
import re

from lark import Token

from shardtensor.plan.text.syntax import KEYWORDS
from shardtensor.spec.reader import Node

_LEVELS = {"choose": 0, "default": 1, "or": 2, "and": 3, "negate": 4, "compare": 5, "sum": 6, "product": 7, "minus": 8}
_MODIFIERS = ("pad", "blocks", "unit", "sizes", "balanced")
_SUFFIXES = ("flat", "only", "partial")
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.*]|\{[A-Za-z0-9_.]*(?:,[A-Za-z0-9_.]*)*\}|<[A-Za-z0-9_]+>)+")


def write(node: Node, least: int = 0) -> str:
    """The text of a value, in brackets where it binds less than `least`."""
    if isinstance(node, Token):
        return str(node)
    text = _WRITE.get(str(node.data), _joined)(node)
    return f"({text})" if _LEVELS.get(str(node.data), 9) < least else text


def glob_text(glob: Node) -> str:
    """A pattern, in quotes only where it needs them."""
    (token,) = glob.children
    if token.type == "GLOB":
        return str(token)
    try:
        text = json.loads(str(token), strict=False)
    except ValueError:
        return str(token)
    return text if _PLAIN.fullmatch(text) and text not in KEYWORDS else str(token)


def _joined(node: Node) -> str:
    """Operators between their sides."""
    least = _LEVELS[str(node.data)] + 1
    words = {"or": " or ", "and": " and "}
    if node.data in words:
        return words[str(node.data)].join(write(child, least) for child in node.children)
    parts = [str(child) if i % 2 else write(child, least) for i, child in enumerate(node.children)]
    return " ".join(parts)


def _default(node: Node) -> str:
    return " ?? ".join(write(child, 2) for child in node.children if getattr(child, "type", "") != "MISSING")


def _choose(node: Node) -> str:
    chosen, condition, other = node.children
    return f"{write(chosen, 1)} if {write(condition, 1)} else {write(other)}"


def _listed(node: Node, first: int = 0) -> str:
    return ", ".join(write(child) for child in node.children[first:])


def _layout(node: Node) -> str:
    return f"[{_listed(node)}]"


def _cut(node: Node) -> str:
    nodes = list(node.children)
    name = f"{nodes.pop(0)}: " if isinstance(nodes[0], Token) else ""
    axes, *modifiers = nodes
    modifiers.sort(key=lambda word: _order(word, _MODIFIERS))
    return name + " ".join(map(write, [axes, *modifiers]))


def _spec(node: Node) -> str:
    head, *suffixes = node.children
    suffixes.sort(key=lambda word: _order(word, _SUFFIXES))
    return " ".join(map(write, [head, *suffixes]))


def _order(word: Node, words: tuple[str, ...]) -> int:
    name = str(word.children[0])
    return words.index(name) if name in words else len(words)


def _tuple(node: Node) -> str:
    return f"({write(node.children[0])},)" if len(node.children) == 1 else f"({_listed(node)})"


def _box(node: Node) -> str:
    slices = [child for child in node.children if not isinstance(child, Token)]
    place = "".join(f" @ {child}" for child in node.children if isinstance(child, Token))
    return f"[{', '.join(map(write, slices))}]{place}"


def _flow(node: Node) -> str:
    return " ".join(write(child) for child in node.children)


def _axis(node: Node) -> str:
    name, *said = node.children
    if not said:
        return str(name)
    return f"{name} {write(said[0])}" if getattr(said[0], "data", "") == "sizes" else f"{name} = {write(said[0])}"


def _needed(node: Node) -> str:
    return "=".join(map(write, node.children))


def _arg(node: Node) -> str:
    return f"{node.children[0]}={write(node.children[1])}"


_WRITE = {
    "arg": _arg,
    "axes": lambda node: "".join(map(str, node.children)),
    "axis": _axis,
    "box": _box,
    "call": lambda node: f"{node.children[0]}({_listed(node, 1)})",
    "choose": _choose,
    "condition": lambda node: f"if {write(node.children[0])}",
    "cut": _cut,
    "default": _default,
    "flow": _flow,
    "glob": glob_text,
    "grad": lambda node: f"grad {write(node.children[0])}",
    "layout": _layout,
    "minus": lambda node: f"-{write(node.children[-1], 9)}",
    "needed": _needed,
    "negate": lambda node: f"not {write(node.children[-1], 4)}",
    "places": _layout,
    "sizes": lambda node: f"({_listed(node)})",
    "slice": lambda node: f"{node.children[0]}:{node.children[1]}",
    "spec": _spec,
    "tuple": _tuple,
    "word": lambda node: ".".join(map(str, node.children)),
}
