"""The elements that a rank receives in a redistribution: those that it needs and does not hold. Integers only."""

from __future__ import annotations

from functools import lru_cache
from operator import mul, sub

from shardtensor.layout.layout import CutLayout, DimCut, Layout
from shardtensor.layout.pieces import Interval
from shardtensor.mesh import Ranks, coordinate

EVERY = 8
"""On grids of up to this many ranks all ranks are counted; on larger ones, a sample of this many."""


@lru_cache(maxsize=8192)
def received(source: Layout, target: Layout) -> int:
    """Return the largest number of elements that a rank receives from `source` to `target`.

    The result is the same on every rank. It is exact on grids of up to eight ranks; on larger ones it is that of a
    sample of eight ranks.

    Example:
        >>> from shardtensor.layout.layout import DimCut, replicated
        >>> from shardtensor.layout.pieces import chunked
        >>> cut = DimCut((0,), chunked(8, 4))
        >>> rows = CutLayout(shape=(8, 8), ranks=range(4), grid=(4,), dims=(cut, None))
        >>> columns = CutLayout(shape=(8, 8), ranks=range(4), grid=(4,), dims=(None, cut))
        >>> received(rows, columns), received(rows, replicated((8, 8), range(4)))
        (12, 48)
    """
    if source is target or source == target:
        return 0
    if isinstance(target, CutLayout):
        return received_over(source, target.ranks, target.grid, target.dims)
    return max(_by_boxes(source, target, rank) for rank in _sampled_ranks(target.ranks))


def received_over(source: Layout, ranks: Ranks, grid: tuple[int, ...], dims: tuple[DimCut | None, ...]) -> int:
    """Return `received` for a target that has the shape of `source` and the cuts `dims` over a grid."""
    sampled = _sampled_ranks(ranks)
    if isinstance(source, CutLayout):
        if source.dims == dims and source.ranks == ranks and source.grid == grid:
            return 0
        return _dim_by_dim(source, ranks, grid, dims, sampled)
    target = CutLayout(shape=source.shape, ranks=ranks, grid=grid, dims=dims)
    return max(_by_boxes(source, target, rank) for rank in sampled)


@lru_cache(maxsize=64)
def _sampled_ranks(ranks: Ranks) -> Ranks:
    """Return all ranks, or the first, the last and six between them, spaced irregularly (by the golden ratio)."""
    count = len(ranks)
    if count <= EVERY:
        return ranks
    spread = ((k * 2654435769 % 2**32) * count >> 32 for k in range(1, EVERY - 1))
    return tuple(ranks[i] for i in sorted({0, count - 1, *spread}))


def _dim_by_dim(
    source: CutLayout, ranks: Ranks, grid: tuple[int, ...], dims: tuple[DimCut | None, ...], sampled: Ranks
) -> int:
    """Return the largest number of elements that a sampled rank lacks: products of the sizes along each dim."""
    count = len(sampled)
    needed = [1] * count
    shared = [1] * count if source.ranks == ranks else [int(rank in source.ranks) for rank in sampled]
    for size, have, want in zip(source.shape, source.dims, dims, strict=True):
        if want is None:
            needed = [n * size for n in needed]
        if have is None and want is None:
            shared = [n * size for n in shared]
            continue
        here = _spans(have, source.ranks, source.grid, sampled) if have is not None else None
        there = _spans(want, ranks, grid, sampled) if want is not None else None
        if there is not None:
            needed = list(map(mul, needed, there[1]))
        if here is None or there is None or here is there:
            shared = list(map(mul, shared, (here or there)[1]))  # type: ignore[index]
        else:
            shared = list(map(mul, shared, map(_common, here[0], there[0])))
    return max(map(sub, needed, shared))


@lru_cache(maxsize=8192)
def _spans(
    cut: DimCut, ranks: Ranks, grid: tuple[int, ...], sampled: Ranks
) -> tuple[list[tuple[Interval, ...]], list[int]]:
    """Return the intervals of a dim that each sampled rank holds, and their numbers of elements."""
    found: list[tuple[Interval, ...]] = []
    for place in _places(ranks, grid, sampled):
        if place is None:
            found.append(())
            continue
        index = 0
        for axis in cut.axes:
            index = index * grid[axis] + place[axis]
        found.append(cut.pieces.intervals(index))
    return found, [sum(stop - start for start, stop in spans) for spans in found]


@lru_cache(maxsize=1024)
def _places(ranks: Ranks, grid: tuple[int, ...], sampled: Ranks) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(coordinate(ranks, grid, rank) for rank in sampled)


def _common(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> int:
    if len(a) == len(b) == 1:
        (p, q), (r, s) = a[0], b[0]
        return max(0, (q if q < s else s) - (p if p > r else r))
    return sum(max(0, min(q, s) - max(p, r)) for p, q in a for r, s in b)


def _by_boxes(source: Layout, target: Layout, rank: int) -> int:
    held = source.boxes(rank)
    shared = 0
    for need in target.boxes(rank):
        for box in held:
            both = box.overlap(need)
            shared += 0 if both is None else both.numel
    return target.numel(rank) - shared
