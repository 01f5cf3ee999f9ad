"""How much a rank receives when a tensor is laid out anew: the elements it needs and does not hold. Integers only."""

from __future__ import annotations

import math
from functools import lru_cache

from shardtensor.layout.layout import CutLayout, Layout
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
    count = _held_and_needed if isinstance(source, CutLayout) and isinstance(target, CutLayout) else _by_boxes
    return max(count(source, target, rank) for rank in _standing_for_all(target.ranks))  # type: ignore[arg-type]


def reduced_over(layout: CutLayout, count: int) -> int:
    """The elements that a rank receives when `count` ranks all-reduce their parts of `layout`, by a ring."""
    part = math.prod(
        size if cut is None else -(-size // cut.pieces.count)
        for size, cut in zip(layout.shape, layout.dims, strict=True)
    )
    return 2 * (count - 1) * part // count


@lru_cache(maxsize=64)
def _standing_for_all(ranks: Ranks) -> Ranks:
    """All ranks, or the first, the last and six spread by the golden ratio, so that no grid has them on a diagonal."""
    count = len(ranks)
    if count <= EVERY:
        return ranks
    spread = ((k * 2654435769 % 2**32) * count >> 32 for k in range(1, EVERY - 1))
    return tuple(ranks[i] for i in sorted({0, count - 1, *spread}))


def _held_and_needed(source: CutLayout, target: CutLayout, rank: int) -> int:
    """What a rank needs less what it holds, dim by dim: both are products of intervals."""
    needs, shared = 1, 1
    here, there = coordinate(source.ranks, source.grid, rank), coordinate(target.ranks, target.grid, rank)
    assert there is not None, "ranks outside need nothing"
    for size, have, want in zip(source.shape, source.dims, target.dims, strict=True):
        if want is None:
            needs *= size
            if here is not None:
                shared *= size if have is None else have.pieces.size(source.piece(have, here))
            continue
        index = target.piece(want, there)
        length = want.pieces.size(index)
        needs *= length
        if here is None:
            continue
        if have is None or (have is want and source.grid == target.grid and here == there):
            shared *= length
        else:
            shared *= _common(have.pieces.intervals(source.piece(have, here)), want.pieces.intervals(index))
    return needs - shared if here is not None else needs


def _common(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> int:
    return sum(max(0, min(q, s) - max(p, r)) for p, q in a for r, s in b)


def _by_boxes(source: Layout, target: Layout, rank: int) -> int:
    held = source.boxes(rank)
    shared = 0
    for need in target.boxes(rank):
        for box in held:
            both = box.overlap(need)
            shared += 0 if both is None else both.numel
    return target.numel(rank) - shared
