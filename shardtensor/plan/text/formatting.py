"""Canonical text of plan files, with comments and without a change of meaning. ``shardtensor fmt`` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import attrs
from lark import Token

from shardtensor.plan.text.syntax import KEYWORDS, VERSION, first_word, parse_plan
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
        span: of its text in the source.
        level: of nesting.
        head, tail: tails of adjacent rows of one kind begin in one column.
        kind: rows of one kind are aligned; empty for none.
        comment: at its end.
        opens, closes: a block.
        follows_gap: an empty line is written before it.
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

    It has the same meaning, and is its own canonical text. Comments stay at the end of their line, or above it.

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
    start = first_word(source.text)
    rows = [_Row((start, span(tree.children[0])[1]), 0, f"shard {VERSION}")]
    for node in tree.children[1:]:
        rows += _rows(source, node, 0)
    rows = _with_comments(source.text, rows)
    for before, row in pairwise(rows):
        row.follows_gap = not (row.closes or before.opens) and "\n\n" in _between(source.text, before, row)
    _align_tails(rows)
    return "".join(_lines(rows))


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
    """Return the text before a block."""
    if node.data == "style":
        name, *params, _ = node.children
        return f"style {name}({', '.join(map(write, params))})"
    *words, glob, _ = node.children
    return "optional " * bool(words) + glob_text(glob)


def _parts(node: Node) -> tuple[str, str, str]:
    """Return the head of a line, its tail, and its kind for alignment."""
    kind, children = str(node.data), list(node.children)
    if kind == "rule":
        head = _head(node)
        return f"{head}:", write(children[-1]), head.startswith("optional ") * "optional " + kind
    if kind in ("in", "out", "local"):
        *names, expr = children
        return f"{' '.join([kind, *names])}:", write(expr), "flow" if kind != "local" else kind
    if kind in ("let", "param"):
        return f"{kind} {children[0]}", "".join(f"= {write(expr)}" for expr in children[1:]), kind
    texts = [write(child) for child in children]
    if kind == "dims":
        condition = f" {texts.pop()}" if children[-1].data == "condition" else ""
        sizes = ", ".join(" = ".join(map(write, child.children)) for child in children[1 : len(texts)])
        return f"dims {texts[0]}", f"({sizes}){condition}", kind
    if kind == "store":
        units = f" by {', '.join(texts[2:])}" if texts[2:] else ""
        return f"store {texts[0]}: {texts[1]}{units}", "", ""
    if kind == "tie":
        return " ".join(["tie", texts[0], "=", *texts[1:]]), "", ""
    return " ".join([f"{kind}:" if kind == "unmatched" else kind, *texts]), "", ""


def _with_comments(text: str, rows: list[_Row]) -> list[_Row]:
    """Return rows with the comments at the ends of their lines, and rows for comments on lines of their own."""
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
    """Align the tails of adjacent rows of one kind."""
    run: list[_Row] = []
    for row in [*rows, _Row((0, 0), 0, "")]:
        if run and (not row.tail or row.follows_gap or (row.kind, row.level) != (run[-1].kind, run[-1].level)):
            width = max(len(each.head) for each in run)
            for each in run:
                aligned = f"{each.head:<{width}} {each.tail}"
                fits = len(INDENT) * each.level + len(aligned) <= WIDTH
                each.head = aligned if fits else f"{each.head} {each.tail}"
            run = []
        run += [row] * bool(row.tail)


def _lines(rows: list[_Row]) -> Iterator[str]:
    for row in rows:
        indent = INDENT * row.level
        text = _broken(indent + row.head, indent)
        yield "\n" * row.follows_gap + text + (f"  {row.comment}" if row.comment else "") + "\n"


def _between(text: str, one: _Row, other: _Row) -> str:
    """Return the text between two rows, without blanks and comments."""
    between = text[one.span[1] : other.span[0]] if one.span[1] <= other.span[0] else ""
    return re.sub(r"#[^\n]*|[ \t\f\r]", "", between)


_BRACKET = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\[({]|[\])}]|,')


def _broken(line: str, indent: str) -> str:
    """Return a long line with each part of its last brackets on its own line."""
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
_ORDER = ("pad", "blocks", "unit", "sizes", "balanced", "flat", "only", "partial")
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.*]|\{[A-Za-z0-9_.]*(?:,[A-Za-z0-9_.]*)*\}|<[A-Za-z0-9_]+>)+")


def write(node: Node, least: int = 0) -> str:
    """Return the text of a value, in brackets if its operator binds less than `least`."""
    if isinstance(node, Token):
        return str(node)
    kind, children = str(node.data), list(node.children)
    if kind == "glob":
        return glob_text(node)
    if kind in ("cut", "spec"):  # modifiers, suffixes
        first = 1 + isinstance(children[0], Token)
        children[first:] = sorted(children[first:], key=lambda word: _rank(str(word.children[0])))
    level = _LEVELS.get(kind, 9)
    inner = [level + (kind != "negate") if kind in _LEVELS else 0] * len(children)
    if kind == "choose":
        inner[-1] = 0
    parts = list(map(write, children, inner))
    if kind == "cut" and first > 1:
        parts[0] += ":"
    if kind == "axis" and getattr(children[-1], "data", "") != "sizes":
        parts = [" = ".join(parts)]
    text = _WRITE[kind](parts) if kind in _WRITE else _BETWEEN.get(kind, " ").join(parts)
    return f"({text})" if level < least else text


def _rank(word: str) -> int:
    return _ORDER.index(word) if word in _ORDER else len(_ORDER)


def glob_text(glob: Node) -> str:
    """Return the text of a pattern, in quotes only if it needs them."""
    (token,) = glob.children
    if token.type == "GLOB":
        return str(token)
    try:
        text = json.loads(str(token), strict=False)
    except ValueError:
        return str(token)
    return text if _PLAIN.fullmatch(text) and text not in KEYWORDS else str(token)


def _box(parts: list[str]) -> str:
    places = [part for part in parts if part[0] == '"']
    return " @ ".join([f"[{', '.join(parts[: len(parts) - len(places)])}]", *places])


_BETWEEN = {"axes": "", "word": ".", "needed": "=", "arg": "=", "slice": ":", "or": " or ", "and": " and "}
_WRITE: dict[str, Callable[[list[str]], str]] = {
    "box": _box,
    "call": lambda parts: f"{parts[0]}({', '.join(parts[1:])})",
    "choose": lambda parts: f"{parts[0]} if {parts[1]} else {parts[2]}",
    "condition": lambda parts: f"if {parts[0]}",
    "grad": lambda parts: f"grad {parts[0]}",
    "layout": lambda parts: f"[{', '.join(parts)}]",
    "minus": lambda parts: f"-{parts[-1]}",
    "negate": lambda parts: f"not {parts[-1]}",
    "places": lambda parts: f"[{', '.join(parts)}]",
    "sizes": lambda parts: f"({', '.join(parts)})",
    "tuple": lambda parts: f"({', '.join(parts)}{',' * (len(parts) == 1)})",
}
