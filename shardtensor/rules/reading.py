"""Parses the text of a rule; errors show the place in the text."""

from __future__ import annotations

import re
from functools import lru_cache

from shardtensor.rules.pattern import Pattern, Side, Term
from shardtensor.spec.diagnostics import Source, listed, nearest

JOINS = ("sum", "avg", "max", "min", "prod", "any", "all")
"""Reductions of the ranks' results along a sharded letter; others are functions, ``@name``."""

_WORD = re.compile(
    r"(?P<bang>!?)(?:\[(?P<inner>!?)(?P<named>[a-z]\w*)(?P<new_named>'?)\]"
    r"|(?P<letter>[a-z]\w*)?(?P<new>'?)(?P<many>\.\.\.)?)(?P<optional>\??)(?P<unit>(?:/1)?)$"
)


@lru_cache(maxsize=4096)
def parse_pattern(text: str, joins: str = "", file: str = "<rule>") -> Pattern:
    """Parse a rule and its joins: the reductions of the ranks' results along letters, separated by commas.

    Raises:
        SpecError: with a caret: a word is not a dim, no operand has a letter of the output, or a contracted letter has
            no join.

    Example:
        >>> parse_pattern("b k, n k -> b n", "k sum").joins
        (('k', 'sum'),)
        >>> parse_pattern("b k, n k -> b n")
        Traceback (most recent call last):
        shardtensor.errors.SpecError: <rule>:1:3: error[E603]: `k` is in no output, and nothing joins the ranks' results
            1 | b k, n k -> b n
              |   ^
          why: a rank that holds a part of `k` has only a part of the result
          fix: say what joins them: `k sum`, avg, max, min, prod, any, all or @function; or `!k`, which must be whole
    """
    source = Source(text, file)
    left, arrow, _ = text.partition("->")
    if not arrow:
        raise source.error("E601", (0, len(text)), "a rule has operands and an output: `... k, n k -> ... n`")
    star = re.fullmatch(r"(\s*)\*\((.*)\)\s*", left)
    start, inside = (len(star[1]) + 2, star[2]) if star else (0, left)
    sides, at = [], start
    for piece in inside.split(","):
        sides.append(_side(source, piece, at))
        at += len(piece) + 1
    output = _side(source, text[len(left) + 2 :], len(left) + 2)
    pattern = Pattern(text, tuple(side for side, _ in sides), output[0], star is not None, _read_joins(joins, file))
    _check(source, pattern, [spans for _, spans in sides], output[1])
    return pattern


Spans = list[tuple[int, int]]


def _side(source: Source, text: str, offset: int) -> tuple[Side, Spans]:
    terms: list[Term] = []
    spans: Spans = []
    added = False
    for k, match in enumerate(re.finditer(r"\S+", text)):
        word, span = match[0], (offset + match.start(), offset + match.end())
        if word == "()":
            continue
        if word == "+" and k == 0:
            added = True
            continue
        found = _WORD.match(word)
        if found is None or not (found["letter"] or found["named"] or found["many"]):
            raise source.error(
                "E602", span, f"`{word}` is no dim", "a dim is `k`, `!k`, `k?`, `[k]`, `k...`, `...`, `k/1` or `k'`"
            )
        letter = found["named"] or found["letter"] or ""
        terms.append(
            Term(
                letter,
                many=bool(found["many"]),
                named=bool(found["named"]),
                whole=bool(found["bang"] or found["inner"]),
                optional=bool(found["optional"]),
                unit=bool(found["unit"]),
                new=bool(found["new"] or found["new_named"]),
            )
        )
        spans.append(span)
    return Side(tuple(terms), added), spans


def _read_joins(text: str, file: str) -> tuple[tuple[str, str], ...]:
    found = []
    for match in re.finditer(r"[^,]+", text):
        words = match[0].split()
        start = match.start() + len(match[0]) - len(match[0].lstrip())
        span = (start, start + len(match[0].strip()))
        if len(words) != 2:
            raise Source(text, file).error("E604", span, f"`{match[0].strip()}` is no join", fix="write `k sum`")
        letter, join = words[0].replace("...", ""), words[1]
        if join not in JOINS and not join.startswith("@"):
            raise Source(text, file).error(
                "E604", span, f"nothing joins as `{join}`", f"there are {listed(JOINS)}", nearest(join, JOINS)
            )
        found.append((letter, join))
    return tuple(found)


def _check(source: Source, pattern: Pattern, spans: list[Spans], out_spans: Spans) -> None:
    known: dict[str, tuple[int, int]] = {}
    whole = {term.letter for side in pattern.sides for term in side.terms if term.whole}
    for side, side_spans in zip(pattern.sides, spans, strict=True):
        several = 0
        here: set[str] = set()
        for term, span in zip(side.terms, side_spans, strict=True):
            several += term.many
            if several > 1:
                raise source.error("E605", span, "one operand can have `...` once only")
            if term.new:
                raise source.error("E605", span, "only a dim of the output can be new")
            if term.letter in here:
                raise source.error("E605", span, f"`{term.letter}` stands twice in one operand")
            here.add(term.letter)
            known.setdefault(term.letter, span)
    kept = set()
    for term, span in zip(pattern.output.terms, out_spans, strict=True):
        if term.letter not in known and not term.new:
            near = nearest(term.letter, known)
            raise source.error(
                "E606",
                span,
                f"no operand has `{term.letter or '...'}`",
                fix=near or f"write `{term.letter}'` for a dim that the operation makes",
            )
        if not term.new:
            kept.add(term.letter)
    for letter, span in known.items():
        if letter not in kept and letter not in whole and pattern.join_of(letter) is None:
            raise source.error(
                "E603",
                span,
                f"`{letter or '...'}` is in no output, and nothing joins the ranks' results",
                f"a rank that holds a part of `{letter or '...'}` has only a part of the result",
                f"say what joins them: `{letter or 'd'} sum`, {listed((*JOINS[1:], '@function'))}; "
                f"or `!{letter or '...'}`, which must be whole",
            )
    for letter, _ in pattern.joins:
        if letter not in known:
            raise source.error(
                "E606",
                (0, len(source.text)),
                f"no operand has `{letter}`, of which a join is given",
                fix=nearest(letter, known),
            )
