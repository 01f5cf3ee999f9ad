"""Rules for operands of any number of dims: ``... m k, ... k n -> ... m n``.

The sides between commas are operands, and words are dims:

* ``k``: a dim. Operands that have the same letter must be sharded in the same way along it. If the output lacks it,
  ``k sum`` says how to reduce the ranks' results.
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

from functools import lru_cache

import attrs

from shardtensor.layout.layout import Shape
from shardtensor.rules.rule import Letters, Rule


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
        joins: for letters, how to reduce the ranks' results if they are sharded: a name of `JOINS`, or ``@function``.
    """

    text: str
    sides: tuple[Side, ...]
    output: Side
    listed: bool
    joins: tuple[tuple[str, str], ...]

    @property
    def joined(self) -> bool:
        """Whether the ranks' results are reduced by a function, or an operand is added after they are reduced."""
        return any(side.added for side in self.sides) or any(join.startswith("@") for _, join in self.joins)

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

    def join_of(self, letter: str) -> str | None:
        """Return the reduction of results along a sharded letter (``k``; ``k0`` of ``k...``; ``.0`` of ``...``)."""
        joins = dict(self.joins)
        return joins.get(letter) or joins.get(letter.rstrip("0123456789").removesuffix("."))

    def bind(self, shapes: tuple[Shape | None, ...], dims: tuple[int, ...] = (), keepdim: bool = False) -> Rule | None:
        """Return the rule for operands of these shapes; None if they do not fit.

        Args:
            shapes: of the operands in order; None for an operand that the call does not pass.
            dims: the dims that the call selects, counted from the front, sorted.

        Example:
            >>> from shardtensor.rules.reading import parse_pattern
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
    lost = {letter for letters in inputs for letter in letters if letter is not None} - set(output)
    joins = ((letter, pattern.join_of(letter) or "none") for letter in sorted(lost - binding.whole))
    return Rule(
        inputs,
        output,
        frozenset(binding.whole),
        tuple((letter, 1) for letter in made),
        tuple((letter, "none" if join.startswith("@") else join) for letter, join in joins if join != "sum"),
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
