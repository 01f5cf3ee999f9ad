"""Rules of indexing with tensors and masks: ``x y r, i, j i -> j i r``. Integers only."""

from __future__ import annotations

from functools import lru_cache

from shardtensor.layout.layout import Shape
from shardtensor.rules.rule import Letters, Rule

Places = tuple[int, ...]
"""The dims that tensors index, in order."""


def first_of(at: Places) -> int:
    """Return the first dim of the result that comes from the indices: their first dim, or 0 if they are not adjacent.

    Example:
        >>> first_of((1, 2)), first_of((1, 3))
        (1, 0)
    """
    return at[0] if at == tuple(range(at[0], at[-1] + 1)) else 0


@lru_cache(maxsize=4096)
def reading(shape: Shape, at: Places, indices: tuple[Shape, ...], broad: Shape) -> Rule:
    """Return the rule of ``x[indices]``: `x` of `shape`, indexed along dims `at` by tensors that broadcast to `broad`.

    A rank that holds a shard of an indexed dim computes zeros for the other elements, so the results are partial sums.

    Example:
        >>> str(reading((5, 6, 7), (0, 2), ((3,), (2, 3)), (2, 3)))
        'x0 r1 x2, i1, i0 i1 -> i0 i1 r1'
    """
    source = tuple(f"x{k}" if k in at else f"r{k}" for k in range(len(shape)))
    letters = tuple(f"i{j}" for j in range(len(broad)))
    rest = [letter for k, letter in enumerate(source) if k not in at]
    first = first_of(at)
    sides = tuple(_broadcast(index, letters, broad) for index in indices)
    return Rule((source, *sides), (*rest[:first], *letters, *rest[first:]))


@lru_cache(maxsize=4096)
def writing(shape: Shape, at: Places, indices: tuple[Shape, ...], broad: Shape, values: Shape) -> Rule:
    """Return the rule of ``x[indices] = values``: every rank needs all values that are written.

    Example:
        >>> str(writing((5, 6), (1,), ((3,),), (3,), (5, 3)))
        'r0 x1, !i0, r0 !i0 -> r0 x1'
    """
    read = reading(shape, at, indices, broad)
    sizes = {letter: n for letter, n in zip(read.inputs[0], shape, strict=True)}
    sizes.update((f"i{j}", n) for j, n in enumerate(broad))
    wanted = tuple(sizes[letter] for letter in read.output if letter is not None)
    whole = frozenset(f"i{j}" for j in range(len(broad)))
    return Rule((*read.inputs, _broadcast(values, read.output, wanted)), read.inputs[0], whole)


def _broadcast(shape: Shape, letters: Letters, full: Shape) -> Letters:
    skip = len(full) - len(shape)
    return tuple(None if n == 1 and full[skip + j] != 1 else letters[skip + j] for j, n in enumerate(shape))
