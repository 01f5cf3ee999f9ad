"""Parse the text of a plan to a syntax tree, and explain syntax errors in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from shardtensor.errors import SpecError
from shardtensor.spec.diagnostics import Source, listed
from shardtensor.spec.parse import (
    CLOSING,
    IN_WORDS,
    check_depth,
    grammar,
    misplaced,
    open_bracket,
    parse_with,
    parser_of,
)

if TYPE_CHECKING:
    from lark import Lark, Token, Tree

VERSION = 1
MAX_LENGTH = 2**16
"""The largest number of characters of one file."""
MAX_BRACKETS = 16
MAX_DEPTH = 64
"""The largest depth of a syntax tree: blocks, and values inside values."""

STATEMENTS = "include param let mesh data dims style require tie store unmatched".split()
KEYWORDS = STATEMENTS + "optional in out use local".split()
"""Words that begin a statement or an entry; as a pattern they are written in quotes."""

_VALUE = {"INT", "BOOL", "LPAR", "LSQB", "NAME", "WHOLE"}
_OPERATORS = {"AND", "OR", "IF", "MISSING", "COMPARE", "PLUS", "WHOLE", "TIMES", "OVER", "NAME", "DOT", "LPAR"}
_ENDS = {"_NL", "COMMA", "RPAR", "RSQB"}
_WORDS = IN_WORDS | {
    "_NL": "the end of the line",
    "ARROW": "`->`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "GLOB": "a pattern",
    "STRING": "text in quotes",
    "SHARD": "`shard`",
} | {word.upper(): f"`{word}`" for word in ("by", "grad", "if", "else", "not", "and", "or")}  # fmt: skip


class _Lines:
    """Drops line ends inside brackets, where a line may break, and repeated ones; adds one after the last line."""

    always_accept = ("_NL",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        from lark import Token

        depth, last = 0, None
        for token in stream:
            if token.type == "_NL" and (depth or last is None or last.type == "_NL"):
                continue
            depth = max(0, depth + {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(token.type, 0))
            last = token
            yield token
        if last is not None and last.type != "_NL":
            end = (last.end_pos, last.end_line, last.end_column)
            yield Token("_NL", "\n", *end, last.end_line, last.end_column, last.end_pos)


@cache
def _parser() -> Lark:
    text = grammar() + files("shardtensor.plan.text").joinpath("grammar.lark").read_text(encoding="utf-8")
    return parser_of(text, ["plan", "value"], _Lines())


def parse_plan(source: Source) -> Tree:
    """Return the syntax tree of a plan file.

    Raises:
        SpecError: E001 with the place, the tokens allowed there and the one found; E002 for another first line.

    Example:
        >>> tree = parse_plan(Source("shard 1\\nfc1.weight: [tp, -]\\n"))
        >>> [str(node.data) for node in tree.children[1:]]
        ['rule']
    """
    if len(source.text) > MAX_LENGTH:
        why = f"it has {len(source.text)} characters, and a file is read up to {MAX_LENGTH}"
        raise source.error("E001", (0, 1), "the plan is too long", why, "fold placements into ranges")
    _check_version(source)
    return _parse(source, "plan")


def parse_value(source: Source) -> Any:
    """Return the syntax tree of one value, such as that of ``--set tp=``."""
    return _parse(source, "value")


@lru_cache(maxsize=32)  # a plan is read again for each value of a parameter that is tried; trees are not changed
def _parse(source: Source, start: str) -> Tree:
    check_depth(source, MAX_BRACKETS)
    tree = parse_with(_parser(), source, _unexpected, start)
    level, depth = [tree], 0
    while level:
        if depth > MAX_DEPTH:
            meta = level[0].meta
            span = (meta.start_pos, meta.end_pos)
            raise source.error("E001", span, f"blocks or values are nested more than {MAX_DEPTH} deep", fix="drop some")
        level = [child for node in level for child in getattr(node, "children", ()) if hasattr(child, "children")]
        depth += 1
    return tree


_FIRST = re.compile(r"(?:[ \t\f\r\n]|#[^\n]*(?:\n|$))*")


def first_word(text: str) -> int:
    """Return the position of the first word of a plan, after comments."""
    return _FIRST.match(text).end()  # type: ignore[union-attr]


def _check_version(source: Source) -> None:
    start = first_word(source.text)
    line = source.text[start:].split("\n", 1)[0].split("#")[0].rstrip()
    if found := re.fullmatch(r"shard[ \t]+([0-9]+)", line):
        if found[1].lstrip("0") == str(VERSION):
            return
        fault, why = f"this plan is written in version {found[1][:20]} of the language", f"version {VERSION} is read"
        raise source.error("E002", (start, start + len(line)), fault, why, "install a newer shardtensor")
    why = "so that a later version of the language cannot be misread"
    span = (start, start + len(line)) if line else (max(0, min(start, len(source.text) - 1)), start + 1)
    raise source.error("E002", span, f"a plan begins with the line `shard {VERSION}`", why, f"write `shard {VERSION}`")


def _unexpected(source: Source, at: int, found: str, kind: str, expected: set[str]) -> SpecError:
    text = source.text
    opened = open_bracket(text[:at])
    if opened is not None and (kind == "_NL" or ("\n" in text[opened:at] and kind in _OF_NEXT_LINE)):
        fault, fix = f"this `{text[opened]}` is never closed", f"close it with `{CLOSING[text[opened]]}`"
        return source.error("E001", (opened, opened + 1), fault, fix=fix)
    head = text[text.rfind("\n", 0, at) + 1 : at].strip()
    if {"COLON", "LBRACE"} <= expected and head in STATEMENTS:
        start = text.rfind(head, 0, at)
        fault, fix = f"`{head}` stands in a block", "move the line out of the braces"
        return source.error("E001", (start, start + len(head)), fault, "it is for a whole file", fix)
    if kind not in ("$END", "_NL") and (word := _WORD.match(text, at)) is not None:
        found = word[0]
    words = listed(_in_words(expected if opened is None else expected - {"_NL"}) or [""])
    why, fix = "", ""
    if {"COLON", "LBRACE"} <= expected and head:
        pattern = head.split()[-1]
        words += f" after the pattern `{pattern}`"
        why = "a rule is `PATTERN: LAYOUT` or `PATTERN { ... }`"
        rest = text[at:].split("\n", 1)[0].split("#")[0].strip()
        fix = f"write `{pattern}: {rest}`" if rest[:1].isalpha() or rest[:1] == "[" else ""
    elif head in KEYWORDS and found[:1] in (":", "{"):
        why, fix = f"`{head}` begins a statement", f'a pattern that is a keyword stands in quotes: `"{head}"`'
    elif "ELSE" in expected and kind in ("$END", "_NL"):
        why, fix = "nothing falls back in silence", "write `else`, and what is meant then"
    elif kind == "$END" and "RBRACE" in expected:
        fix = "close the block with `}`"
    return misplaced(source, at, found, kind, expected, words, why, fix)


_OF_NEXT_LINE = ("", "$END", "COLON", "EQUAL", "GLOB", "LBRACE")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _in_words(expected: set[str]) -> list[str]:
    """Return the allowed tokens in words; the many operators after a value are left out."""
    words = []
    if "LET" in expected:
        words, expected = ["a statement", "a pattern"], set()
    elif {"GLOB", "IN"} <= expected:
        words, expected = ["a pattern", "`in`", "`out`", "`use`", "`local`"], expected & {"RBRACE"}
    elif {"INT", "BOOL"} <= expected:
        words, expected = ["a value"], expected - _VALUE - {"NOT"}
    elif expected & _ENDS and expected & {"PLUS", "TIMES"}:
        expected = expected - _OPERATORS
    return words + [word for kind, word in _WORDS.items() if kind in expected]
