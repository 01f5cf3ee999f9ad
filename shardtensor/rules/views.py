"""The layouts of views and reductions: reshapes, slices, permutations, sums over dims. Integers only."""

from __future__ import annotations

import math
from functools import lru_cache

from shardtensor.layout.layout import DimCut, MeshLayout, Shape
from shardtensor.layout.pieces import Blocked, Pieces, Stepped, listed
from shardtensor.rules.propagate import with_dims


def scaled(pieces: Pieces, factor: int) -> Pieces:
    """Return the shards of a dim in which each element becomes `factor` elements.

    Example:
        >>> [scaled(Stepped(5, 2, 3), 4).interval(i) for i in range(2)]
        [(0, 12), (12, 20)]
    """
    if factor == 1:
        return pieces
    if isinstance(pieces, Blocked):
        return Blocked(tuple(scaled(block, factor) for block in pieces.blocks))
    if isinstance(pieces, Stepped):
        return Stepped(pieces.length * factor, pieces.count, pieces.step * factor)
    return listed(tuple(pieces.size(i) * factor for i in range(pieces.count)))


def divided(pieces: Pieces, factor: int) -> Pieces | None:
    """Return the shards of a dim in which each `factor` elements become one; None if a shard ends between them."""
    if factor == 1:
        return pieces
    if isinstance(pieces, Blocked):
        blocks = [divided(block, factor) for block in pieces.blocks]
        return None if None in blocks else Blocked(tuple(blocks))  # type: ignore[arg-type]
    if isinstance(pieces, Stepped):
        if pieces.length % factor == 0 and (pieces.step % factor == 0 or pieces.step >= pieces.length):
            return Stepped(pieces.length // factor, pieces.count, -(-pieces.step // factor))
        return None
    sizes = [pieces.size(i) for i in range(pieces.count)]
    return None if any(size % factor for size in sizes) else listed(tuple(size // factor for size in sizes))


def clipped(pieces: Pieces, start: int, stop: int, step: int) -> Pieces | None:
    """Return the shards of ``range(start, stop, step)`` of a dim, without communication; None for blocked shards.

    Example:
        >>> [clipped(Stepped(8, 4, 2), 1, 7, 2).size(i) for i in range(4)]
        [1, 1, 1, 0]
    """
    if isinstance(pieces, Blocked):
        return None
    return listed(tuple(taken(*pieces.intervals(i)[0], start, stop, step)[1] for i in range(pieces.count)))


def taken(a: int, b: int, start: int, stop: int, step: int) -> tuple[int, int]:
    """Return the offset in ``[a, b)`` of the first element of ``range(start, stop, step)``, and their number there."""
    first = start + max(0, -(-(a - start) // step)) * step
    return first - a, max(0, -(-(min(b, stop) - first) // step))


@lru_cache(maxsize=8192)
def reshaped(layout: MeshLayout, shape: Shape) -> MeshLayout | None:
    """Return the layout of a tensor reshaped to `shape` without communication; None if elements would have to move.

    Dims form groups that hold the same elements before and after. A sharded dim must be the outermost of its group
    (only dims of size 1 before it), and each shard must be a whole number of elements of the new outermost dim.
    """
    before, dims = layout.shape, layout.dims
    out: list[DimCut | None] = []
    i = j = 0
    while i < len(before) or j < len(shape):
        first, after = i, j
        old, new = 1, 1
        if i < len(before):
            old, i = before[i], i + 1
        if j < len(shape):
            new, j = shape[j], j + 1
        while old != new:
            if old < new:
                if i == len(before):
                    return None
                old, i = old * before[i], i + 1
            else:
                if j == len(shape):
                    return None
                new, j = new * shape[j], j + 1
        group = _regroup(before[first:i], dims[first:i], shape[after:j])
        if group is None:
            return None
        out += group
    return with_dims(layout, shape, tuple(out))


def _regroup(before: Shape, dims: tuple[DimCut | None, ...], shape: Shape) -> list[DimCut | None] | None:
    cut = [d for d, dim in enumerate(dims) if dim is not None]
    out: list[DimCut | None] = [None] * len(shape)
    if not cut:
        return out
    if len(cut) > 1 or any(n != 1 for n in before[: cut[0]]) or not shape:
        return None
    old = dims[cut[0]]
    assert old is not None
    place = next((d for d, n in enumerate(shape) if n != 1), 0)
    pieces = divided(scaled(old.pieces, math.prod(before[cut[0] + 1 :])), math.prod(shape[place + 1 :]))
    if pieces is None:
        return None
    out[place] = DimCut(old.axes, pieces)
    return out


@lru_cache(maxsize=8192)
def permuted(layout: MeshLayout, order: tuple[int, ...]) -> MeshLayout:
    """Return the layout with its dims in another order."""
    return with_dims(layout, tuple(layout.shape[d] for d in order), tuple(layout.dims[d] for d in order))


@lru_cache(maxsize=8192)
def expanded(layout: MeshLayout, shape: Shape) -> MeshLayout | None:
    """Return the layout of a tensor broadcast to `shape`; None if a sharded dim, of size 1, would grow."""
    new = len(shape) - len(layout.shape)
    grown = zip(layout.shape, shape[new:], layout.dims, strict=True)
    if any(cut is not None and n != m for n, m, cut in grown):
        return None
    return with_dims(layout, shape, (*(None,) * new, *layout.dims))


@lru_cache(maxsize=8192)
def repeated(layout: MeshLayout, times: tuple[int, ...]) -> MeshLayout | None:
    """Return the layout of a tensor repeated along its dims and new ones in front; None for a sharded dim."""
    new = len(times) - len(layout.shape)
    if any(n != 1 and cut is not None for n, cut in zip(times[new:], layout.dims, strict=True)):
        return None
    shape = (*times[:new], *(n * size for n, size in zip(times[new:], layout.shape, strict=True)))
    return with_dims(layout, shape, (*(None,) * new, *layout.dims))


def heads_fit(query: MeshLayout, key: MeshLayout, value: MeshLayout, groups: int) -> bool:
    """Whether each rank's query heads (`groups` for a key head) match its keys and values, and other dims are equal."""
    if query.partial or key.partial or value.partial:
        return False
    if not (query.grid == key.grid == value.grid and query.ranks == key.ranks == value.ranks):
        return False
    if key.dims != value.dims or any((*query.dims[-2:], *key.dims[-2:])) or query.dims[:-3] != key.dims[:-3]:
        return False
    heads, fewer = query.dims[-3], key.dims[-3]
    if heads is None or fewer is None:
        return heads is fewer
    return heads.axes == fewer.axes and heads.pieces == scaled(fewer.pieces, groups)
