"""Canonical text of plan files: one style, comments kept, the meaning untouched. What ``shardtensor fmt`` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise

import attrs
from lark import Token

from shardtensor.plan.text.syntax import KEYWORDS, VERSION, parse_plan
from shardtensor.spec.diagnostics import Source
from shardtensor.spec.reader import Node, span

INDENT = "    "
WIDTH = 120
"""Longer lines are broken inside their last brackets."""

_CLOSING = re.compile(r"#[^\n]*|\}")
_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|(#[^\n]*)')


@attrs.define
class _Row:
    """One line to be written, or one that is broken inside brackets.

    Attributes:
        span: where its text stood.
        level: of nesting.
        head, tail: tails of neighbours of one kind begin in one column.
        kind: what may be aligned with it; empty for nothing.
        comment: at its end.
        opens, closes: a block.
        follows_gap: an empty line stands before it.
    """

    span: tuple[int, int]
    level: int
    head: str
    tail: str = ""
    kind: str = ""
    comment: str = ""
    opens: bool = False
    closes: bool = False
    follows_gap: bool = False


def format_plan(source: Source) -> str:
    """Return the canonical text of a plan file.

    It means the same, and its own canonical text is itself. Comments stay: at the end of their line, or above it.

    Raises:
        SpecError: it is no plan.

    Example:
        >>> print(format_plan(Source("shard 1\\nfc {\\n weight :[ tp,- ]# rows\\n in: replicate\\n}")), end="")
        shard 1
        fc {
            weight: [tp, -]  # rows
            in:     replicate
        }
    """
    tree = parse_plan(source)
    start = source.text.index("shard", _after_comments(source.text))
    rows = [_Row((start, span(tree.children[0])[1]), 0, f"shard {VERSION}")]
    for node in tree.children[1:]:
        rows += _rows(source, node, 0)
    rows = _with_comments(source.text, rows)
    for before, row in pairwise(rows):
        row.follows_gap = not (row.closes or before.opens) and "\n\n" in _between(source.text, before, row)
    _align_tails(rows)
    return "".join(_lines(rows))


def _after_comments(text: str) -> int:
    """Where the first word stands."""
    at = 0
    while (found := re.compile(r"\s*#[^\n]*").match(text, at)) is not None:
        at = found.end()
    return at


def _rows(source: Source, node: Node, level: int) -> Iterator[_Row]:
    last = node.children[-1] if node.children else None
    start = span(node)[0]
    if getattr(last, "data", "") == "block":
        end = span(last)[0] + 1
        yield _Row((start, end), level, f"{_head(node)} {{", opens=True)
        for child in last.children:  # type: ignore[union-attr]
            yield from _rows(source, child, level + 1)
            end = span(child)[1]
        end = next(match.start() for match in _CLOSING.finditer(source.text, end) if match[0] == "}")
        yield _Row((end, end + 1), level, "}", closes=True)
        return
    head, tail, kind = _parts(node)
    yield _Row((start, span(last)[1] if last is not None else span(node)[1]), level, head, tail, kind)


def _head(node: Node) -> str:
    """What stands before a block."""
    *words, glob_or_param, _ = node.children
    if node.data == "style":
        params = [*words, glob_or_param]
        return f"style {params[0]}({', '.join(map(write, params[1:]))})"
    return " ".join([*_prefixes(words), glob_text(glob_or_param)])


def _prefixes(tokens: list[Node]) -> list[str]:
    return ["optional"] if tokens else []


def _parts(node: Node) -> tuple[str, str, str]:
    """The head of a line, its tail, and what it is aligned with."""
    kind, children = str(node.data), list(node.children)
    if kind == "rule":
        *prefixes, glob, said = children
        words = _prefixes(prefixes)
        return " ".join([*words, glob_text(glob)]) + ":", write(said), " ".join([*words, kind])
    if kind in ("in", "out"):
        *names, said = children
        return " ".join([kind, *map(str, names)]) + ":", write(said), "flow"
    if kind == "local":
        return f"local {children[0]}:", write(children[1]), kind
    if kind in ("let", "param"):
        name, *said = children
        return f"{kind} {name}", f"= {write(said[0])}" if said else "", kind
    if kind == "dims":
        condition = f" {write(children.pop())}" if children[-1].data == "condition" else ""
        return f"dims {glob_text(children[0])}", f"({', '.join(map(_given, children[1:]))}){condition}", kind
    if kind == "include":
        return f"include {children[0]}", "", ""
    if kind == "store":
        glob, said, *by = children
        units = f" by {', '.join(map(glob_text, by))}" if by else ""
        return f"store {glob_text(glob)}: {write(said)}{units}", "", ""
    if kind == "tie":
        condition = f" {write(children[2])}" if len(children) > 2 else ""
        return f"tie {glob_text(children[0])} = {glob_text(children[1])}{condition}", "", ""
    if kind == "require":
        return f"require {write(children[0])} {children[1]}", "", ""
    if kind == "unmatched":
        return f"unmatched: {write(children[0])}", "", ""
    return f"{kind} {write(children[0])}", "", ""  # mesh, data, use


def _given(arg: Node) -> str:
    """A value of a statement, which has more room than one of a call."""
    return f"{arg.children[0]} = {write(arg.children[1])}"


def _with_comments(text: str, rows: list[_Row]) -> list[_Row]:
    """Rows with the comments at the ends of their lines, and rows for comments that stand alone."""
    placed: list[_Row] = []
    comments = [match.span(1) for match in _COMMENT.finditer(text) if match[1]]
    for i, row in enumerate(rows):
        while comments and comments[0][0] < row.span[1]:  # above the row, or inside its brackets
            place = comments.pop(0)
            level = row.level + row.closes
            placed.append(_Row(place, level, text[slice(*place)].rstrip(), kind="#"))
        stop = text.find("\n", row.span[1])
        stop = len(text) if stop < 0 else stop
        following = rows[i + 1].span[0] if i + 1 < len(rows) else len(text)
        if comments and comments[0][0] < min(stop, following):
            row.comment = text[slice(*comments.pop(0))].rstrip()
        placed.append(row)
    placed += [_Row(place, 0, text[slice(*place)].rstrip(), kind="#") for place in comments]
    return placed


def _align_tails(rows: list[_Row]) -> None:
    """Tails of neighbours begin in one column."""
    for run in _runs(rows):
        width = max(len(row.head) for row in run)
        for row in run:
            aligned = f"{row.head:<{width}} {row.tail}"
            fits = len(INDENT) * row.level + len(aligned) <= WIDTH
            row.head = aligned if fits else f"{row.head} {row.tail}"


def _runs(rows: list[_Row]) -> Iterator[list[_Row]]:
    run: list[_Row] = []
    for row in rows:
        if run and (row.follows_gap or (row.kind, row.level) != (run[-1].kind, run[-1].level)):
            yield run
            run = []
        if row.tail:
            run.append(row)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _lines(rows: list[_Row]) -> Iterator[str]:
    texts = [_broken(INDENT * row.level + row.head, INDENT * row.level) for row in rows]
    column, end = 0, 0
    for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
        if row.follows_gap:
            yield "\n"
        if row.comment and i >= end:  # comments of neighbours begin in one column
            following = range(i + 1, len(rows))
            end = next((j for j in following if not _is_neighbour(row, rows[j])), len(rows))
            column = max(_width(text) for text in texts[i:end])
        yield text + (" " * (column - _width(text) + 2) + row.comment if row.comment else "") + "\n"


def _is_neighbour(row: _Row, other: _Row) -> bool:
    """Whether comments of two rows are aligned, if those of all between are."""
    return bool(other.comment) and not other.follows_gap and other.level == row.level and not row.opens


def _width(text: str) -> int:
    """Of the last line."""
    return len(text) - text.rfind("\n") - 1


def _between(text: str, one: _Row, other: _Row) -> str:
    """What stands between two rows, without blanks and comments."""
    between = text[one.span[1] : other.span[0]] if one.span[1] <= other.span[0] else ""
    return re.sub(r"#[^\n]*|[ \t\f\r]", "", between)


_BRACKET = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\[({]|[\])}]|,')


def _broken(line: str, indent: str) -> str:
    """A long line with each part of its last brackets on a line of its own."""
    if len(line) <= WIDTH or line.lstrip().startswith("#"):
        return line
    depth, end = 0, 0
    groups: list[tuple[int, int]] = []
    commas: list[int] = []
    for match in _BRACKET.finditer(line):
        if match[0] in "[(":
            depth += 1
            if depth == 1:
                groups.append((match.end(), len(commas)))
        elif match[0] in "])":
            depth -= 1
            end = match.start() if depth == 0 else end
        elif match[0] == "," and depth == 1:
            commas.append(match.start())
    if not groups:
        return line
    start, first = groups[-1]
    places = [start, *(at + 1 for at in commas[first:])]
    parts = [line[a:b].strip() for a, b in zip(places, [*places[1:], end], strict=True)]
    if len(parts) < 2:
        return line
    inner = "\n".join(f"{indent}{INDENT}{part}" for part in parts)
    return f"{line[:start]}\n{inner}\n{indent}{line[end:]}"


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
