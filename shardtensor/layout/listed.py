"""Layouts of listed boxes: a `CutLayout` if the boxes form a grid, so that equal shards give equal layouts."""

from __future__ import annotations

import math
from itertools import product

from shardtensor.layout.box import Box
from shardtensor.layout.layout import CutLayout, DimCut, Layout, ListedLayout, Shape
from shardtensor.layout.pieces import listed
from shardtensor.mesh import as_ranks


def listed_layout(owned: tuple[tuple[int, Box], ...], shape: Shape) -> Layout:
    """Return the layout of boxes, each with its rank, that tile `shape`."""
    ranks = tuple(dict.fromkeys(rank for rank, _ in owned))
    if len(ranks) == len(owned):
        grid = _as_grid(owned, shape)
        if grid is not None:
            return grid
    return ListedLayout(shape=shape, ranks=ranks, grid=(len(ranks),), owned=owned)


def _as_grid(owned: tuple[tuple[int, Box], ...], shape: Shape) -> CutLayout | None:
    intervals = [
        sorted({(box.offsets[dim], box.sizes[dim]) for _, box in owned}, key=_first_then_long)
        for dim in range(len(shape))
    ]
    grid = tuple(len(choices) for choices in intervals)
    if math.prod(grid) != len(owned) or any(
        _end(choices) != size for choices, size in zip(intervals, shape, strict=True)
    ):
        return None
    holder = {box: rank for rank, box in owned}
    order = []
    for choice in product(*intervals):
        rank = holder.get(Box(tuple(start for start, _ in choice), tuple(size for _, size in choice)))
        if rank is None:
            return None
        order.append(rank)
    dims = tuple(
        DimCut((axis,), listed(tuple(size for _, size in choices))) if len(choices) > 1 else None
        for axis, choices in enumerate(intervals)
    )
    cut = [axis for axis, size in enumerate(grid) if size > 1]
    if shape and not cut:  # one box is a shard of dim 0: the layout must differ from a replicated one
        dims = (DimCut((0,), listed(shape[:1])), *dims[1:])
        grid = (1,)
    if len(cut) == 1:  # one cut dim: the same layout as a chunk spec gives
        dims = tuple(DimCut((0,), cut_dim.pieces) if cut_dim is not None else None for cut_dim in dims)
        grid = (grid[cut[0]],)
    return CutLayout(shape=shape, ranks=as_ranks(order), grid=grid or (1,), dims=dims)


def _first_then_long(interval: tuple[int, int]) -> tuple[int, int]:
    """Return the sort key of an interval: its start; an empty interval comes last among those of one start."""
    return interval[0], -interval[1]


def _end(choices: list[tuple[int, int]]) -> int | None:
    """Return the end of consecutive intervals, or None if they leave a gap or overlap."""
    end = 0
    for start, size in choices:
        if start != end:
            return None
        end += size
    return end
