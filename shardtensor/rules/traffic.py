"""How much a rank receives when a tensor is laid out anew: the elements it needs and does not hold. Integers only."""

from __future__ import annotations

from functools import lru_cache
from operator import mul, sub

from shardtensor.layout.layout import CutLayout, DimCut, Layout
from shardtensor.layout.pieces import Interval
from shardtensor.mesh import Ranks, coordinate

EVERY = 8
"""Grids of at most this many ranks are gone through; of larger ones, this many ranks stand for all."""


@lru_cache(maxsize=8192)
def received(source: Layout, target: Layout) -> int:
    """The elements that the rank which receives most must be sent to hold its part of `target`, holding `source`.

    The same on every rank that asks. Exact on grids of up to eight ranks; on larger ones eight ranks stand for all.

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
    return max(_by_boxes(source, target, rank) for rank in _standing_for_all(target.ranks))


def received_over(source: Layout, ranks: Ranks, grid: tuple[int, ...], dims: tuple[DimCut | None, ...]) -> int:
    """`received`, where the target has the dims of `source` cut as `dims` over a grid."""
    asked = _standing_for_all(ranks)
    if isinstance(source, CutLayout):
        if source.dims == dims and source.ranks == ranks and source.grid == grid:
            return 0
        return _dim_by_dim(source, ranks, grid, dims, asked)
    target = CutLayout(shape=source.shape, ranks=ranks, grid=grid, dims=dims)
    return max(_by_boxes(source, target, rank) for rank in asked)


@lru_cache(maxsize=64)
def _standing_for_all(ranks: Ranks) -> Ranks:
    """All ranks, or the first, the last and six spread by the golden ratio, so that no grid has them on a diagonal."""
    count = len(ranks)
    if count <= EVERY:
        return ranks
    spread = ((k * 2654435769 % 2**32) * count >> 32 for k in range(1, EVERY - 1))
    return tuple(ranks[i] for i in sorted({0, count - 1, *spread}))


def _dim_by_dim(
    source: CutLayout, ranks: Ranks, grid: tuple[int, ...], dims: tuple[DimCut | None, ...], asked: Ranks
) -> int:
    """The most that one of `asked` needs and does not hold: both are products of what it has of each dim."""
    count = len(asked)
    needed = [1] * count
    shared = [1] * count if source.ranks == ranks else [int(rank in source.ranks) for rank in asked]
    for size, have, want in zip(source.shape, source.dims, dims, strict=True):
        if want is None:
            needed = [n * size for n in needed]
        if have is None and want is None:
            shared = [n * size for n in shared]
            continue
        here = _spans(have, source.ranks, source.grid, asked) if have is not None else None
        there = _spans(want, ranks, grid, asked) if want is not None else None
        if there is not None:
            needed = list(map(mul, needed, there[1]))
        if here is None or there is None or here is there:
            shared = list(map(mul, shared, (here or there)[1]))  # type: ignore[index]
        else:
            shared = list(map(mul, shared, map(_common, here[0], there[0])))
    return max(map(sub, needed, shared))


@lru_cache(maxsize=8192)
def _spans(
    cut: DimCut, ranks: Ranks, grid: tuple[int, ...], asked: Ranks
) -> tuple[list[tuple[Interval, ...]], list[int]]:
    """The intervals of a cut dim that each rank in `asked` holds, and how many elements they are."""
    found: list[tuple[Interval, ...]] = []
    for place in _places(ranks, grid, asked):
        if place is None:
            found.append(())
            continue
        index = 0
        for axis in cut.axes:
            index = index * grid[axis] + place[axis]
        found.append(cut.pieces.intervals(index))
    return found, [sum(stop - start for start, stop in spans) for spans in found]


@lru_cache(maxsize=1024)
def _places(ranks: Ranks, grid: tuple[int, ...], asked: Ranks) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(coordinate(ranks, grid, rank) for rank in asked)


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
