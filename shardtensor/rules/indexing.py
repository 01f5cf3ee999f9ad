"""Indexing: by integers, slices, None and ..., and by tensors and masks, ``x y r, i, j i -> j i r``. Integers only."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs

from shardtensor.layout.layout import DimCut, MeshLayout, Shape
from shardtensor.mesh import coordinate
from shardtensor.rules.propagate import with_dims
from shardtensor.rules.rule import Letters, Rule
from shardtensor.rules.views import clipped, taken

Item = int | tuple[int, int, int] | None
"""One integer, a slice as (start, stop, step), or None for a new dim."""


@attrs.frozen
class Indexing:
    """How one rank indexes its local tensor.

    Attributes:
        layout: of the result, once reduced.
        local: the index of the local tensor; an empty slice if this rank does not hold the element of an integer.
        to_sum: dims of the locally indexed tensor to sum, and so drop: those of an integer in a sharded dim.
        axes: along which to sum the results, because only one rank holds the element of an integer.
    """

    layout: MeshLayout
    local: tuple[Any, ...]
    to_sum: tuple[int, ...]
    axes: tuple[int, ...]


def normalize(index: Any, shape: tuple[int, ...]) -> tuple[Item, ...] | None:
    """Return basic indices, one for each dim and new dim; None for any other kind (tensors, lists, bools).

    Raises:
        IndexError: as in torch: there are too many indices, or one is out of range.

    Example:
        >>> normalize((..., -1), (2, 3)), normalize((slice(1, None), None), (2, 3))
        (((0, 2, 1), 2), ((1, 2, 1), None, (0, 3, 1)))
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is Ellipsis or isinstance(i, slice) or _is_integer(i) for i in items):
        return None
    taking = sum(i is not None and i is not Ellipsis for i in items)
    if taking > len(shape):
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    if sum(i is Ellipsis for i in items) > 1:
        return None
    fill = [slice(None)] * (len(shape) - taking)
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = fill
    out: list[Item] = []
    dim = 0
    for item in items:
        if item is None:
            out.append(None)
            continue
        size = shape[dim]
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 1:
                raise ValueError("step must be greater than zero")
            out.append((start, max(start, stop), step))
        else:
            place = item.__index__()
            if not -size <= place < size:
                raise IndexError(f"index {place} is out of bounds for dimension {dim} with size {size}")
            out.append(place % size)
        dim += 1
    return tuple(out)


def _is_integer(item: Any) -> bool:
    return not isinstance(item, bool) and hasattr(item, "__index__") and not hasattr(item, "shape")


@lru_cache(maxsize=8192)
def indexing(layout: MeshLayout, items: tuple[Item, ...], rank: int) -> Indexing | None:
    """Return how `rank` indexes; None for a slice of a dim if a rank holds several intervals of that dim.

    Each rank keeps its elements of a slice of a sharded dim, so the shards may be uneven. For an integer in a sharded
    dim one rank holds the element.
    """
    place = coordinate(layout.ranks, layout.grid, rank)
    shape: list[int] = []
    dims: list[DimCut | None] = []
    local: list[Any] = []
    to_sum: list[int] = []
    axes: list[int] = []
    dim = kept = 0
    for item in items:
        if item is None:
            shape.append(1)
            dims.append(None)
            local.append(None)
            kept += 1
            continue
        size, cut = layout.shape[dim], layout.dims[dim]
        dim += 1
        if isinstance(item, int):
            if cut is None:
                local.append(item)
                continue
            axes += cut.axes
            to_sum.append(kept)
            kept += 1
            spans = () if place is None else cut.pieces.intervals(layout.piece(cut, place))
            at, before = slice(0, 0), 0
            for a, b in spans:
                if a <= item < b:
                    at = slice(before + item - a, before + item - a + 1)
                before += b - a
            local.append(at)
            continue
        start, stop, step = item
        count = -(-(stop - start) // step)
        shape.append(count)
        kept += 1
        if cut is None or (start, stop, step) == (0, size, 1):
            dims.append(cut)
            local.append(slice(start, stop, step) if cut is None else slice(None))
            continue
        pieces = clipped(cut.pieces, start, stop, step)
        if pieces is None:
            return None
        dims.append(DimCut(cut.axes, pieces))
        first, many = (0, 0) if place is None else taken(*cut.pieces.intervals(layout.piece(cut, place))[0], *item)
        local.append(slice(first, first + many * step, step) if many else slice(0, 0))
    return Indexing(with_dims(layout, tuple(shape), tuple(dims)), tuple(local), tuple(to_sum), tuple(sorted(axes)))


# -- several indices at once -------------------------------------------------------------------------------------------

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
    target = tuple(sizes[letter] for letter in read.output if letter is not None)
    whole = frozenset(f"i{j}" for j in range(len(broad)))
    return Rule((*read.inputs, _broadcast(values, read.output, target)), read.inputs[0], whole)


def _broadcast(shape: Shape, letters: Letters, full: Shape) -> Letters:
    skip = len(full) - len(shape)
    return tuple(None if n == 1 and full[skip + j] != 1 else letters[skip + j] for j, n in enumerate(shape))
