"""Parse text to a spec, ``parse_spec("[tp, -]")``; convert a text or any spec to a spec, ``as_spec``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import attrs

from shardtensor.errors import SpecError
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec
from shardtensor.spec.diagnostics import Source, listed
from shardtensor.spec.nodes import ShardingSpec

if TYPE_CHECKING:
    from lark import Lark, Tree


MAX_LENGTH = 2**17
MAX_DEPTH = 16
SHORT = 4096
"""The largest number of characters of a text that is cached."""


def parse_spec(text: str, *, max_length: int = MAX_LENGTH) -> ShardingSpec:
    """Parse a spec. ``parse_spec(str(spec)) == spec`` for every spec.

    Equal short texts are parsed once. A text longer than `max_length` raises, so that no input costs seconds.

    Raises:
        SpecError: with the line, the column, a caret, what was expected and the nearest word.

    Example:
        >>> parse_spec("[ tp*dp , - ]  flat( fs )")
        parse_spec('[tp*dp, -] flat(fs)')
        >>> parse_spec("[tp unti(128), -]")
        Traceback (most recent call last):
        shardtensor.errors.SpecError: <spec>:1:5: error[E102]: no modifier is called `unti`
            1 | [tp unti(128), -]
              |     ^^^^
          why: there are pad, blocks, unit, sizes, balanced
          fix: did you mean `unit`?
    """
    if not isinstance(text, str):
        raise SpecError(f"a spec is text, found {type(text).__name__}", fix="as_spec takes objects too", code="E001")
    return _private(_parse_short(text) if len(text) <= SHORT else _parse(text, max_length))


def _parse(text: str, max_length: int = MAX_LENGTH) -> ShardingSpec:
    from shardtensor.spec.reader import Reader  # lark is imported when the first text is parsed

    source = Source(text)
    return Reader(source).spec(_parse_syntax(source, max_length))


_parse_short = lru_cache(maxsize=1024)(_parse)


def as_spec(spec: Any) -> ShardingSpec:
    """Return `spec`, or the spec of a text; torch's own specs are converted.

    Mutable specs are copied.

    Example:
        >>> as_spec("replicate")
        parse_spec('replicate')
    """
    if isinstance(spec, ShardingSpec):
        return _private(spec)
    if isinstance(spec, str):
        return parse_spec(spec)
    if type(spec).__module__.startswith("torch.distributed._shard"):
        if hasattr(spec, "placements"):
            return ChunkShardingSpec(spec.dim, spec.placements)
        if hasattr(spec, "shards"):
            return EnumerableShardingSpec(spec.shards)
    raise SpecError(
        f"not a spec: {spec!r}",
        {"found": f"an object of type {type(spec).__name__}"},
        'write text such as "[tp, -]", or make a Spec, ChunkShardingSpec, GridShardingSpec or EnumerableShardingSpec',
        code="E001",
    )


def _private(spec: ShardingSpec) -> ShardingSpec:
    """Return a copy of a mutable spec, and any other spec itself."""
    return attrs.evolve(spec) if type(spec) is ChunkShardingSpec else spec


_BRACKET = re.compile(r'"(?:[^"\\\n]|\\.)*"|#[^\n]*|[\[(]|[\])]')

IN_WORDS = {
    "$END": "the end",
    "COLON": "`:`",
    "COMMA": "`,`",
    "EQUAL": "`=`",
    "INT": "a number",
    "LPAR": "`(`",
    "LSQB": "`[`",
    "NAME": "a name",
    "REST": "`...`",
    "RPAR": "`)`",
    "RSQB": "`]`",
    "STRING": "a string",
    "TIMES": "`*`",
    "WHOLE": "`-`",
    "AT": "`@`",
}


def grammar() -> str:
    """Return the grammar of specs."""
    return files("shardtensor.spec").joinpath("grammar.lark").read_text(encoding="utf-8")


def parser_of(grammar: str, start: list[str], postlex: Any = None) -> Lark:
    """Return the parser of a grammar, with its start rules; `postlex` transforms its tokens."""
    from lark import Lark

    return Lark(
        grammar, start=start, postlex=postlex, parser="lalr", propagate_positions=True, maybe_placeholders=False
    )


@cache
def _parser() -> Lark:
    return parser_of(grammar(), ["spec"])


def _parse_syntax(source: Source, max_length: int) -> Tree:
    text = source.text
    if not text.strip():
        raise source.error("E001", (0, 1), "the spec is empty", fix="write `replicate`, or dims as in `[tp, -]`")
    if len(text) > max_length:
        why = f"it has {len(text)} characters, and a text is read up to {max_length}"
        fix = "fold placements into ranges, or raise max_length"
        raise source.error("E001", (0, 1), "the spec is too long", why, fix)
    check_depth(source, MAX_DEPTH)
    return parse_with(_parser(), source, _unexpected)


def parse_with(parser: Lark, source: Source, unexpected: Callable[..., SpecError], start: str | None = None) -> Tree:
    """Return the syntax tree of a text, for any grammar.

    Args:
        unexpected: returns the error for a token that is not allowed, from the source, the token's position, text and
            kind, and the kinds that are allowed there.
    """
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken

    try:
        return parser.parse(source.text, start=start)
    except UnexpectedToken as error:
        token = error.token
        raise unexpected(source, token.start_pos or 0, str(token), token.type, set(error.accepts)) from None
    except UnexpectedCharacters as error:
        at = error.pos_in_stream or 0
        raise unexpected(source, at, source.text[at], "", set(error.interactive_parser.accepts())) from None


def check_depth(source: Source, most: int) -> None:
    """Raise SpecError if brackets are nested deeper than `most`."""
    depth = 0
    for match in _BRACKET.finditer(source.text):
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(match[0], 0)
        if depth > most:
            raise source.error("E001", match.span(), f"brackets are nested more than {most} deep", fix="drop some")


def _unexpected(source: Source, at: int, found: str, kind: str, expected: set[str]) -> SpecError:
    text, advice = source.text, ("", "")
    words = [word for name, word in IN_WORDS.items() if name in expected]
    opened = open_bracket(text)
    at = len(text) if kind == "$END" else at
    if kind == "$END" and opened is not None:
        column = opened - text.rfind("\n", 0, opened)
        advice = f"the `{text[opened]}` at column {column} is open", f"close it with `{CLOSING[text[opened]]}`"
    elif text[:at].strip() == "" and found in "({":
        advice = "the dims of a tensor stand in square brackets", "write them as in `[tp, -]`"
    elif found in ("]", "[") and text[:at].rstrip().endswith(("[", ",")):
        advice = "a layout has one entry a dim: an axis, `-` for a whole dim, or `...`", "write them as in `[tp, -]`"
    return misplaced(source, at, found, kind, expected, listed(words) if words else "", *advice)


def misplaced(
    source: Source, at: int, found: str, kind: str, expected: set[str], words: str, why: str = "", fix: str = ""
) -> SpecError:
    """Return the error for a token that is not allowed at `at`; `words` lists what is allowed."""
    if kind in ("$END", "_NL"):
        shown = "the end" if kind == "$END" else "the end of the line"
        at = len(source.text[:at].rstrip()) if kind == "$END" else at
        found = " "
    else:
        if found == "'":
            found, why, fix = _quoted(source.text, at, expected)
        elif found == '"':
            why, fix = "a string ends on its line", 'close it with `"`'
        shown = f"`{found if len(found) <= 40 else found[:40] + '...'}`"
    fault = f"expected {words}, found {shown}" if words else f"{shown} cannot stand here"
    return source.error("E001", (at, at + len(found)), fault, why, fix)


def _quoted(text: str, at: int, expected: set[str]) -> tuple[str, str, str]:
    """Return the text in single quotes at `at`, why it is not allowed there, and what to write instead."""
    found = re.compile(r"'([^'\n]*)'").match(text, at)
    is_name = "NAME" in expected and found is not None and found[1].isidentifier()
    if "STRING" in expected and not is_name:
        return found[0] if found else "'", "strings stand in double quotes", f'write `"{found[1] if found else ""}"`'
    return found[0] if found else "'", "names stand without quotes", f"write `{found[1]}`" if found else "drop it"


CLOSING = {"[": "]", "(": ")"}


def open_bracket(text: str) -> int | None:
    """Return the position of the last bracket that is not closed; None if all are."""
    opened = []
    for match in _BRACKET.finditer(text):
        if match[0] in "[(":
            opened.append(match.start())
        elif match[0] in "])" and opened:
            opened.pop()
    return opened[-1] if opened else None
