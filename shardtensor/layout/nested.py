"""Layouts with one placement for each mesh axis, as DTensor has them.

Each axis shards a dim, is partial, or holds replicas. An axis chunks its dim as torch.chunk does, and the next axis of
the same dim chunks the shard again (a strided shard order). With *blocks* an axis first chunks the shard into that many
blocks and then each of them; so a later axis can be the major one of a dim, and fused blocks can be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, permutations, product

import attrs

from shardtensor.layout.layout import DimCut, Layout, MeshLayout, Shape
from shardtensor.layout.pieces import Blocked, Interval, Pieces, chunked, listed, packed, placed
from shardtensor.mesh import Mesh, index_along

# The largest number of blocks tried for uneven shards, by the number of axes that shard the dim.
_TRIED = {1: 64, 2: 16, 3: 8}


@attrs.frozen
class CutDim:
    """An axis that shards a dim, each of its `blocks` separately."""

    dim: int
    blocks: int = 1


@attrs.frozen
class Partials:
    """An axis along which the value is partial, reduced by `op`."""

    op: str


Axis = CutDim | Partials | None
"""The placement of one axis; None: its ranks are replicas."""

Runs = tuple[Interval, ...]
"""Intervals of a dim, in the order in which a rank holds them."""


@lru_cache(maxsize=1024)
def nested_layout(axes: tuple[Axis, ...], shape: Shape, mesh: Mesh, order: tuple[int, ...] | None = None) -> MeshLayout:
    """Return the layout with one placement for each axis; the axes cut in `order`, from left to right if None."""
    cuts: dict[int, list[tuple[int, int]]] = {}
    for axis in range(len(axes)) if order is None else order:
        what = axes[axis]
        if isinstance(what, CutDim):
            cuts.setdefault(what.dim, []).append((axis, what.blocks))
    dims: list[DimCut | None] = [None] * len(shape)
    for dim, cut in cuts.items():
        numbers = [axis for axis, _ in cut]
        order, pieces = _pieces(shape[dim], tuple(mesh.sizes[axis] for axis in numbers), tuple(n for _, n in cut))
        dims[dim] = DimCut(tuple(numbers[i] for i in order), pieces)
    partial = tuple((axis, what.op) for axis, what in enumerate(axes) if isinstance(what, Partials))
    return MeshLayout(
        shape=shape, ranks=mesh.ranks, grid=mesh.sizes, dims=tuple(dims), partial=partial, names=mesh.names
    )


@lru_cache(maxsize=1024)
def nested_axes(layout: Layout, mesh: Mesh) -> tuple[Axis, ...] | None:
    """Return the placement of each axis of a mesh that gives a layout; None if there are none."""
    if isinstance(layout, MeshLayout) and (layout.grid, layout.ranks) == (mesh.sizes, mesh.ranks):
        return _axes_of_cuts(layout)
    if not set(layout.ranks) <= set(mesh.ranks):
        return None
    choices = [None, *(CutDim(dim) for dim in range(len(layout.shape))), *(Partials(op) for _, op in layout.partial)]
    for axes in product(choices, repeat=len(mesh.sizes)):
        found = nested_layout(axes, layout.shape, mesh)
        if all(_holdings(found, rank) == _holdings(layout, rank) for rank in mesh.ranks):
            return axes
    return None


def nearest_nested(layout: Layout, mesh: Mesh) -> MeshLayout:
    """Return a layout with one placement for each axis in which the same axes shard the same dims, by chunks."""
    axes: list[Axis] = [None if not layout.shape else CutDim(0) for _ in mesh.sizes]
    if isinstance(layout, MeshLayout) and (layout.grid, layout.ranks) == (mesh.sizes, mesh.ranks):
        dim_of = {axis: dim for dim, cut in enumerate(layout.dims) if cut is not None for axis in cut.axes}
        op_of = dict(layout.partial)
        axes = [
            CutDim(dim_of[axis]) if axis in dim_of else Partials(op_of[axis]) if axis in op_of else None
            for axis in range(len(mesh.sizes))
        ]
    return nested_layout(tuple(axes), layout.shape, mesh)


def _axes_of_cuts(layout: MeshLayout) -> tuple[Axis, ...] | None:
    axes: list[Axis] = [None] * len(layout.grid)
    for axis, op in layout.partial:
        axes[axis] = Partials(op)
    for dim, cut in enumerate(layout.dims):
        if cut is not None:
            found = _blocks(cut, layout.grid)
            if found is None:
                return None
            for axis, blocks in found.items():
                axes[axis] = CutDim(dim, blocks)
    return tuple(axes)


def _blocks(cut: DimCut, grid: tuple[int, ...]) -> dict[int, int] | None:
    """Return the number of blocks of each axis for which nested chunks, from left to right, are the shards of `cut`."""
    axes = tuple(sorted(cut.axes))
    counts = tuple(grid[axis] for axis in axes)
    order = tuple(cut.axes.index(axis) for axis in axes)
    pieces = [_merged(run for run in cut.pieces.intervals(i) if run[0] < run[1]) for i in range(cut.pieces.count)]
    expected = _reordered(pieces, tuple(grid[axis] for axis in cut.axes), order)
    fused = len(cut.pieces.blocks) if isinstance(cut.pieces, Blocked) else 1
    majors = {axis: [major for major in cut.axes[:place] if major > axis] for place, axis in enumerate(cut.axes)}
    usual = tuple(fused * math.prod(grid[major] for major in majors[axis]) for axis in axes)
    odd = product(range(1, _TRIED.get(len(axes), 1) + 1), repeat=len(axes))
    for blocks in chain((usual,), odd):
        if _nested_slices(cut.pieces.length, counts, blocks) == expected:
            return dict(zip(axes, blocks, strict=True))
    return None


def _holdings(layout: Layout, rank: int) -> tuple[object, ...]:
    """Return the non-empty boxes of a rank, and for each reduction the ranks that hold partial sums of them."""
    mesh = Mesh(tuple((str(axis), size) for axis, size in enumerate(layout.grid)), layout.ranks)
    sums = [
        (op, sorted(mesh.ranks_along(rank, [axis for axis, other in layout.partial if other == op])))
        for op in sorted({op for _, op in layout.partial})
        if rank in layout.ranks
    ]
    return [box for box in layout.boxes(rank) if box.numel], sums


@lru_cache(maxsize=1024)
def _pieces(length: int, counts: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[tuple[int, ...], Pieces]:
    """Return the shards of a dim that several axes chunk, and the order of the axes that needs the fewest blocks."""
    natural = tuple(range(len(counts)))
    if len(counts) == 1 and blocks == (1,):
        return natural, chunked(length, counts[0])
    parts = _nested_slices(length, counts, blocks)
    candidates = [(order, _as_pieces(length, _reordered(parts, counts, order))) for order in permutations(natural)]
    return min(candidates, key=lambda pair: len(pair[1].blocks) if isinstance(pair[1], Blocked) else 1)


def _nested_slices(length: int, counts: tuple[int, ...], blocks: tuple[int, ...]) -> list[Runs]:
    """Return the shard of a dim at each coordinate of the axes that chunk it, row-major."""
    parts: list[Runs] = [((0, length),)]
    for count, number in zip(counts, blocks, strict=True):
        parts = [part for runs in parts for part in _chunks_of_blocks(runs, count, number)]
    return parts


def _chunks_of_blocks(runs: Runs, count: int, blocks: int) -> list[Runs]:
    """Chunk `runs` into blocks, and each block into `count`; part i has the i-th chunk of each block."""

    def chunk(runs: Sequence[Interval], parts: int, i: int) -> list[Interval]:
        length = sum(stop - start for start, stop in runs)
        return placed(packed(runs), runs, *chunked(length, parts).interval(i))

    first = [chunk(runs, blocks, i) for i in range(blocks)]
    return [_merged(run for part in first for run in chunk(part, count, i)) for i in range(count)]


def _merged(runs: Iterable[Interval]) -> Runs:
    """Merge adjacent intervals."""
    found: list[Interval] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _reordered(parts: Sequence[Runs], counts: tuple[int, ...], order: tuple[int, ...]) -> list[Runs]:
    """Transpose `parts`, row-major over `counts`, to another order of the counts."""
    found = []
    for steps in product(*(range(counts[i]) for i in order)):
        place = [step for _, step in sorted(zip(order, steps, strict=True))]
        found.append(parts[index_along(range(len(counts)), counts, place)])
    return found


def _as_pieces(length: int, parts: Sequence[Runs]) -> Pieces:
    """Return `parts` as shards of blocks: the fewest blocks with at most one interval of each part, in order."""
    owned = sorted((start, stop, i) for i, runs in enumerate(parts) for start, stop in runs)
    blocks: list[list[tuple[int, int, int]]] = [[]]
    for run in owned:
        if blocks[-1] and run[2] <= blocks[-1][-1][2]:
            blocks.append([])
        blocks[-1].append(run)
    cut = []
    for block in blocks:
        sizes = [0] * len(parts)
        for start, stop, i in block:
            sizes[i] = stop - start
        cut.append(listed(tuple(sizes)))
    assert sum(pieces.length for pieces in cut) == length, "the parts make up the dim"
    return cut[0] if len(cut) == 1 else Blocked(tuple(cut))
