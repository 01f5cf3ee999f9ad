"""The sharding rule of an operation, in einsum's notation: ``b k, n k -> b n``.

Each dim of an operand has a letter. If several operands have a letter, it must be sharded in the same way in all of
them, and the output is sharded so too. A letter that the output lacks is contracted: if it is sharded, the result is
partial. An operand without the letter that an axis shards is replicated along that axis, and its gradient is partial.
There are two marks beside einsum's notation (which einops and Shardy's sharding rules use too):

* ``!k``: dim k must not be sharded (softmax over it, a sort along it);
* ``1``: a dim of size 1 that is broadcast; it is not sharded and has no letter.

A `Rule` is for operands of fixed numbers of dims; `shardtensor.rules.pattern` makes one from a row of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import attrs

from shardtensor.layout.layout import Shape

Letters = tuple[str | None, ...]


@attrs.frozen(cache_hash=True)
class Rule:
    """The letters of every operand and of the output.

    Attributes:
        whole: letters that must not be sharded.
        made: letters that only the output has, with their sizes (the dim of `cat`, a reduced dim under ``keepdim``).
        combine: for letters that the output lacks, the reduction of the results if it is not a sum; "none" if each rank
            has the full result.
    """

    inputs: tuple[Letters, ...]
    output: Letters
    whole: frozenset[str] = frozenset()
    made: tuple[tuple[str, int], ...] = ()
    combine: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        def side(letters: Letters) -> str:
            return " ".join("1" if x is None else f"!{x}" if x in self.whole else x for x in letters) or "()"

        return f"{', '.join(map(side, self.inputs))} -> {side(self.output)}"


def one_dim(ndim: int, dim: int) -> int:
    """Return `dim` of a tensor of `ndim` dims, counted from the front.

    Raises:
        IndexError: as in torch: it is out of range.

    Example:
        >>> one_dim(3, -1), one_dim(0, -1)
        (2, 0)
    """
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim})")
    return dim % bound


def several_dims(ndim: int, dim: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the dims of one number, several, or None (all of them), sorted and counted from the front.

    Raises:
        IndexError: as in torch: one is out of range.
        RuntimeError: as in torch: one appears twice.

    Example:
        >>> several_dims(3, (-1, 0)), several_dims(2, None), several_dims(2, ())
        ((0, 2), (0, 1), (0, 1))
    """
    if dim is None:
        return tuple(range(ndim))
    if isinstance(dim, int):
        return (one_dim(ndim, dim),)
    dims = tuple(sorted(one_dim(ndim, d) for d in dim))
    if len(set(dims)) != len(dims):
        twice = next(d for d in dims if dims.count(d) > 1)
        raise RuntimeError(f"dim {twice} appears multiple times in the list of dims")
    return dims or tuple(range(ndim))


@lru_cache(maxsize=4096)
def einsum_rule(equation: str, shapes: tuple[Shape, ...]) -> Rule | None:
    """Return the rule of an equation for operands of `shapes`; None if it does not fit them (torch then raises).

    An ellipsis becomes one letter for each of its dims. A letter that is twice in one operand (a diagonal) must be
    whole.

    Example:
        >>> str(einsum_rule("bik,bkj->bij", ((2, 3, 4), (2, 4, 5))))
        'b i k, b k j -> b i j'
        >>> str(einsum_rule("ii", ((3, 3),)))
        '!i !i -> ()'
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    sides = left.split(",")
    if len(sides) != len(shapes):
        return None
    broadcast = max(len(s) - len(side.replace("...", "")) for side, s in zip(sides, shapes, strict=True))
    dots = [f"...{i}" for i in range(broadcast)]
    inputs = []
    for side, shape in zip(sides, shapes, strict=True):
        head, ellipsis, tail = side.partition("...")
        room = len(shape) - len(head) - len(tail)
        if room < 0 or (room and not ellipsis):
            return None
        inputs.append([*head, *dots[broadcast - room :], *tail] if room else [*head, *tail])
    counts = Counter(letter for letters in inputs for letter in letters)
    if arrow:
        head, ellipsis, tail = right.partition("...")
        output = [*head, *(dots if ellipsis else ()), *tail]
    else:
        output = dots + sorted(x for x, n in counts.items() if n == 1 and not x.startswith("..."))
    if any(letter not in counts for letter in output) or len(set(output)) != len(output):
        return None
    sizes: dict[str, int] = {}
    for letters, shape in zip(inputs, shapes, strict=True):
        if len(set(zip(letters, shape, strict=True))) != len(set(letters)):
            return None  # a diagonal of two sizes
        for letter, size in zip(letters, shape, strict=True):
            if sizes.get(letter, 1) == 1:
                sizes[letter] = size
            elif size not in (1, sizes[letter]):
                return None
    whole = frozenset(x for letters in inputs for x, n in Counter(letters).items() if n > 1)
    named = tuple(
        tuple(None if size == 1 and sizes[letter] != 1 else letter for letter, size in zip(letters, shape, strict=True))
        for letters, shape in zip(inputs, shapes, strict=True)
    )
    return Rule(named, tuple(output), whole)
