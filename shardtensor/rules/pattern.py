"""Rules for operands of any number of dims: ``... m k, ... k n -> ... m n``.

The sides between commas are operands, and words are dims:

* ``k``: a dim. Operands that have the same letter must be sharded in the same way along it. If the output lacks it,
  ``k sum`` is the reduction of the ranks' results.
* ``...``: any number of dims, broadcast as in torch. ``i...``: any number, with equal sizes in all sides.
* ``[k]``: the dims that the call selects (its ``dim``), at any position; if the output lacks them, they have size 1
  there under ``keepdim=True``.
* ``!k``, ``[!k]``, ``!k...``: must not be sharded.
* ``m?``: may be missing if the operand has too few dims. ``l/1``: may have size 1, and is broadcast then.
* ``k'``: only in the output, or of another size than in the operand: the size of the local result.
* ``+ n``, as a side: an operand that is added after the ranks' results are reduced.
* ``*(...)``: a list of operands; letters that must not be sharded are different in each.
"""

from __future__ import annotations

import re
from functools import lru_cache

import attrs

from shardtensor.layout.layout import Shape
from shardtensor.rules.rule import Letters, Rule
from shardtensor.spec.diagnostics import Source, listed, nearest


@attrs.frozen
class Term:
    """One word: a letter and its marks; ``...`` alone has an empty letter."""

    letter: str
    many: bool = False
    named: bool = False
    whole: bool = False
    optional: bool = False
    unit: bool = False
    new: bool = False


@attrs.frozen
class Side:
    """An operand, or the output: its words, and whether it is added after the results are reduced."""

    terms: tuple[Term, ...]
    added: bool = False


@attrs.frozen(eq=False)
class Pattern:
    """A rule for any shapes; `bind` returns the `Rule` for given ones.

    Attributes:
        sides: the operands; if `listed`, one side for each operand of a list.
        combine: for letters, what combines the results if they are sharded: one of `REDUCTIONS`, or ``@function``.
    """

    text: str
    sides: tuple[Side, ...]
    output: Side
    listed: bool
    combine: tuple[tuple[str, str], ...]

    @property
    def names_dims(self) -> bool:
        """Whether the call selects dims."""
        return any(term.named for side in (*self.sides, self.output) for term in side.terms)

    @property
    def is_elementwise(self) -> bool:
        """Whether all operands are broadcast to the shape of the output."""
        return all(side.terms == (Term("", many=True),) for side in (*self.sides, self.output))

    @property
    def reduces(self) -> bool:
        """Whether the output lacks the dims that the call selects."""
        return self.names_dims and not any(term.named for term in self.output.terms)

    @property
    def makes_sizes(self) -> bool:
        """Whether a dim of the output has the size of the local result."""
        return any(term.new for term in self.output.terms)

    def combiner_of(self, letter: str) -> str | None:
        """Return the reduction of results along a sharded letter (``k``; ``k0`` of ``k...``; ``.0`` of ``...``)."""
        combine = dict(self.combine)
        return combine.get(letter) or combine.get(letter.rstrip("0123456789").removesuffix("."))

    def bind(self, shapes: tuple[Shape | None, ...], dims: tuple[int, ...] = (), keepdim: bool = False) -> Rule | None:
        """Return the rule for operands of these shapes; None if they do not fit.

        Args:
            shapes: of the operands in order; None for an operand that the call does not pass.
            dims: the dims that the call selects, counted from the front, sorted.

        Example:
            >>> from shardtensor.rules.pattern import parse_pattern
            >>> pattern = parse_pattern("... m? k, ... k n? -> ... m? n?", "k sum")
            >>> str(pattern.bind(((5, 2, 3), (3, 4))))
            '.0 m k, k n -> .0 m n'
            >>> str(pattern.bind(((3,), (3,))))
            'k, k -> ()'
            >>> pattern.bind(((2, 3), (4, 5))) is None
            True
            >>> str(parse_pattern("... [!d] -> ... [d]").bind(((2, 3, 4),), (1,)))
            '.0 !d .1 -> .0 !d .1'
        """
        return _bind(self, shapes, dims, keepdim)

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=8192)
def _bind(pattern: Pattern, shapes: tuple[Shape | None, ...], dims: tuple[int, ...], keepdim: bool) -> Rule | None:
    sides = pattern.sides * len(shapes) if pattern.listed else pattern.sides
    if pattern.is_elementwise:  # an operand may be a number
        sides = pattern.sides[:1] * len(shapes)
    if len(shapes) != len(sides):
        return None
    binding = _Binding(dims)
    rows = []
    for i, (side, shape) in enumerate(zip(sides, shapes, strict=True)):
        if shape is None:
            continue
        row = binding.row(side, len(shape), f"_{i}" if pattern.listed else "")
        if row is None:
            return None
        rows.append((row, shape))
    inputs = binding.inputs(rows)
    if inputs is None:
        return None
    output, made = binding.output(pattern, keepdim)
    reduced = {letter for letters in inputs for letter in letters if letter is not None} - set(output)
    combine = ((letter, pattern.combiner_of(letter) or "none") for letter in sorted(reduced - binding.whole))
    return Rule(
        inputs,
        output,
        frozenset(binding.whole),
        tuple((letter, 1) for letter in made),
        tuple((letter, "none" if how.startswith("@") else how) for letter, how in combine if how != "sum"),
    )


class _Binding:
    """The dims of each word, as the operands are bound one after the other."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims
        self.counts: dict[str, int] = {}  # the number of dims of `i...` or `[k]`; of `...` the largest number
        self.whole: set[str] = set()
        self.single: set[str] = set()  # letters of one dim

    def row(self, side: Side, ndim: int, suffix: str) -> list[tuple[str, Term]] | None:
        """Return a name and its word for every dim of an operand; None if it has another number of dims."""
        terms = list(side.terms)
        spare = ndim - sum(len(self.dims) if t.named else not t.many for t in terms)
        for term in [t for t in terms if t.optional]:
            if spare < 0:
                terms.remove(term)
                spare += 1
        names: list[tuple[str, Term]] = []
        for term in terms:
            if term.named:
                continue
            if not term.many:
                self.single.add(term.letter)
                names.append((term.letter + suffix * term.whole, term))
                continue
            if term.letter and self.counts.setdefault(term.letter, spare) != spare:
                return None
            if not term.letter:
                self.counts[""] = max(self.counts.get("", 0), spare)
            names += [(f"#{spare - k}" if not term.letter else _nth(term.letter, k, spare), term) for k in range(spare)]
        for term in terms:
            if term.named:
                self.counts[term.letter] = len(self.dims)
                for k, dim in enumerate(self.dims):
                    names.insert(dim, (_nth(term.letter, k, len(self.dims)) + suffix * term.whole, term))
        if len(names) != ndim:
            return None
        self.whole |= {name for name, term in names if term.whole}
        return names

    def inputs(self, rows: list[tuple[list[tuple[str, Term]], Shape]]) -> tuple[Letters, ...] | None:
        """Return the letters of every operand; None if the sizes do not match."""
        sizes: dict[str, int] = {}
        for row, shape in rows:
            for (name, _), size in zip(row, shape, strict=True):
                if sizes.get(name, 1) == 1:
                    sizes[name] = size
        found = []
        for row, shape in rows:
            letters: list[str | None] = []
            for (name, term), size in zip(row, shape, strict=True):
                broadcasts = size == 1 and sizes[name] != 1
                if size != sizes[name] and not (broadcasts and (term.unit or not term.letter)):
                    return None
                letters.append(None if broadcasts else self.dot(name))
            found.append(tuple(letters))
        return tuple(found)

    def dot(self, name: str) -> str:
        """Return the letter of a dim of ``...``; its names count from the right until all operands are bound."""
        return f".{self.counts[''] - int(name[1:])}" if name.startswith("#") else name

    def output(self, pattern: Pattern, keepdim: bool) -> tuple[Letters, list[str]]:
        """Return the letters of the output, and those of them that no operand has."""
        letters: list[str | None] = []
        made: list[str] = []
        named: Term | None = None
        for term in pattern.output.terms:
            if term.named:
                named = term
            elif term.many:
                count = self.counts.get(term.letter, 0)
                names = [f".{k}" if not term.letter else _nth(term.letter, k, count) for k in range(count)]
                names = [f"{name}'" for name in names] if term.new else names
                letters += names
                made += names if term.new else []
            elif term.new:
                letters.append(f"{term.letter}'")
                made.append(f"{term.letter}'")
            elif term.letter in self.single:
                letters.append(term.letter)
        if named is not None or (keepdim and pattern.reduces):
            for k, dim in enumerate(self.dims):
                if named is None:
                    letters.insert(dim, None)
                    continue
                name = named.letter if named.letter in self.single else _nth(named.letter, k, len(self.dims))
                name = f"{name}'" if named.new else name
                made += [name] if named.new else []
                letters.insert(dim, name)
        self.whole |= set(made)
        return tuple(letters), made


def _nth(letter: str, k: int, count: int) -> str:
    return letter if count == 1 else f"{letter}{k}"


# -- the text of a rule ------------------------------------------------------------------------------------------------

REDUCTIONS = ("sum", "avg", "max", "min", "prod")
"""Reductions of the ranks' results along a sharded letter; others are functions, ``@name``."""

_WORD = re.compile(
    r"(?P<bang>!?)(?:\[(?P<inner>!?)(?P<named>[a-z]\w*)(?P<new_named>'?)\]"
    r"|(?P<letter>[a-z]\w*)?(?P<new>'?)(?P<many>\.\.\.)?)(?P<optional>\??)(?P<unit>(?:/1)?)$"
)


@lru_cache(maxsize=4096)
def parse_pattern(text: str, combine: str = "", file: str = "<rule>") -> Pattern:
    """Parse a rule and its combiners: the reductions of the ranks' results along letters, separated by commas.

    Raises:
        SpecError: with a caret: a word is not a dim, no operand has a letter of the output, or a contracted letter has
            no combiner.

    Example:
        >>> parse_pattern("b k, n k -> b n", "k sum").combine
        (('k', 'sum'),)
        >>> parse_pattern("b k, n k -> b n")
        Traceback (most recent call last):
        shardtensor.errors.SpecError: <rule>:1:3: error[E603]: `k` is in no output, and nothing combines the results
            1 | b k, n k -> b n
              |   ^
          why: a rank that holds a part of `k` has only a part of the result
          fix: say how: `k sum`, avg, max, min, prod or @function; or `!k`, which must be whole
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
    pattern = Pattern(text, tuple(side for side, _ in sides), output[0], star is not None, _read_combine(combine, file))
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


def _read_combine(text: str, file: str) -> tuple[tuple[str, str], ...]:
    found = []
    for match in re.finditer(r"[^,]+", text):
        words = match[0].split()
        start = match.start() + len(match[0]) - len(match[0].lstrip())
        span = (start, start + len(match[0].strip()))
        if len(words) != 2:
            raise Source(text, file).error("E604", span, f"`{match[0].strip()}` combines nothing", fix="write `k sum`")
        letter, how = words[0].replace("...", ""), words[1]
        if how not in REDUCTIONS and not how.startswith("@"):
            raise Source(text, file).error(
                "E604", span, f"`{how}` is no reduction", f"there are {listed(REDUCTIONS)}", nearest(how, REDUCTIONS)
            )
        found.append((letter, how))
    return tuple(found)


def _check(source: Source, pattern: Pattern, spans: list[Spans], out_spans: Spans) -> None:
    seen: dict[str, tuple[int, int]] = {}
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
            seen.setdefault(term.letter, span)
    kept = set()
    for term, span in zip(pattern.output.terms, out_spans, strict=True):
        if term.letter not in seen and not term.new:
            near = nearest(term.letter, seen)
            raise source.error(
                "E606",
                span,
                f"no operand has `{term.letter or '...'}`",
                fix=near or f"write `{term.letter}'` for a dim that the operation makes",
            )
        if not term.new:
            kept.add(term.letter)
    for letter, span in seen.items():
        if letter not in kept and letter not in whole and pattern.combiner_of(letter) is None:
            raise source.error(
                "E603",
                span,
                f"`{letter or '...'}` is in no output, and nothing combines the results",
                f"a rank that holds a part of `{letter or '...'}` has only a part of the result",
                f"say how: `{letter or 'd'} sum`, {listed((*REDUCTIONS[1:], '@function'))}; "
                f"or `!{letter or '...'}`, which must be whole",
            )
    for letter, _ in pattern.combine:
        if letter not in seen:
            raise source.error(
                "E606",
                (0, len(source.text)),
                f"no operand has `{letter}`, for which a combiner is given",
                fix=nearest(letter, seen),
            )
