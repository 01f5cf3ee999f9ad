"""Layouts said axis by axis, as DTensor says them: what an axis cuts is what the axes before it have left.

Each axis of a mesh either cuts a dim, holds addends, or holds copies. An axis cuts its dim as torch.chunk does, and the
piece that is left is cut again by the next axis of the same dim. With *blocks* it first chunks what is left into that
many stretches and cuts each of them; so a later axis can be the major one of a dim, and so fused blocks are cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, permutations, product

import attrs

from shardtensor.layout.layout import CutLayout, DimCut, Layout, Shape
from shardtensor.layout.pieces import Blocked, Pieces, chunked
from shardtensor.layout.regrid import on_mesh
from shardtensor.layout.stretches import as_pieces, joined, nested_parts, reordered
from shardtensor.mesh import Mesh

# By axes of one dim: up to how many blocks are tried for uneven pieces that are not the usual ones.
_TRIED = {1: 64, 2: 16, 3: 8}


@attrs.frozen
class CutDim:
    """An axis that cuts a dim, each of `blocks` stretches of it by itself."""

    dim: int
    blocks: int = 1


@attrs.frozen
class Addends:
    """An axis whose ranks hold addends, joined by `op`."""

    op: str


Said = CutDim | Addends | None
"""What one axis does; None: its ranks hold copies."""


@lru_cache(maxsize=1024)
def nested_layout(said: tuple[Said, ...], shape: Shape, mesh: Mesh, order: tuple[int, ...] | None = None) -> CutLayout:
    """The layout that axes say, one after the other.

    Args:
        said: for each axis of the mesh.
        order: in which the axes cut; from left to right when None.

    Example:
        >>> mesh = Mesh((("dp", 2), ("tp", 2)))
        >>> print(nested_layout((CutDim(0), CutDim(0)), (8, 3), mesh), nested_layout((None, CutDim(1)), (8, 3), mesh))
        [dp*tp, -] [-, tp]
        >>> print(nested_layout((CutDim(0, blocks=2), CutDim(0)), (8, 3), mesh))
        [tp*dp, -]
    """
    cuts: dict[int, list[tuple[int, int]]] = {}
    for axis in range(len(said)) if order is None else order:
        what = said[axis]
        if isinstance(what, CutDim):
            cuts.setdefault(what.dim, []).append((axis, what.blocks))
    dims = tuple(_dim_cut(length, cuts[dim], mesh.sizes) if dim in cuts else None for dim, length in enumerate(shape))
    partial = tuple((axis, what.op) for axis, what in enumerate(said) if isinstance(what, Addends))
    return CutLayout(shape=shape, ranks=mesh.ranks, grid=mesh.sizes, dims=dims, partial=partial, names=mesh.names)


@lru_cache(maxsize=1024)
def say_nested(layout: Layout, mesh: Mesh) -> tuple[Said, ...] | None:
    """Say a layout axis by axis over a mesh; None where that cannot be said.

    Example:
        >>> mesh = Mesh((("dp", 2), ("tp", 2)))
        >>> say_nested(nested_layout((CutDim(1), None), (8, 3), mesh), mesh)
        (CutDim(dim=1, blocks=1), None)
    """
    seen = on_mesh(layout, mesh)
    if isinstance(seen, CutLayout):
        return _say_cuts(seen)
    if seen is None or seen.partial:
        return None
    choices = [None, *(CutDim(dim) for dim in range(len(layout.shape)))]
    for said in product(choices, repeat=len(mesh.sizes)):
        found = nested_layout(said, layout.shape, mesh)
        if all(_meant(found, rank) == _meant(layout, rank) for rank in mesh.ranks):
            return said
    return None


def nearest_nested(layout: Layout, mesh: Mesh) -> CutLayout:
    """A layout that can be said axis by axis, much like one that cannot: the same axes cut the same dims, by chunks."""
    said: list[Said] = [None if not layout.shape else CutDim(0) for _ in mesh.sizes]
    seen = on_mesh(layout, mesh)
    if isinstance(seen, CutLayout):
        dim_of = {axis: dim for dim, cut in enumerate(seen.dims) if cut is not None for axis in cut.axes}
        op_of = dict(seen.partial)
        said = [
            CutDim(dim_of[axis]) if axis in dim_of else Addends(op_of[axis]) if axis in op_of else None
            for axis in range(len(mesh.sizes))
        ]
    return nested_layout(tuple(said), layout.shape, mesh)


def _say_cuts(layout: CutLayout) -> tuple[Said, ...] | None:
    said: list[Said] = [None] * len(layout.grid)
    for axis, op in layout.partial:
        said[axis] = Addends(op)
    for dim, cut in enumerate(layout.dims):
        if cut is not None:
            found = _blocks(cut, layout.grid)
            if found is None:
                return None
            for axis, blocks in found.items():
                said[axis] = CutDim(dim, blocks)
    return tuple(said)


def _blocks(cut: DimCut, grid: tuple[int, ...]) -> dict[int, int] | None:
    """The blocks of each axis of a cut, with which nested cuts from left to right give its pieces."""
    axes = tuple(sorted(cut.axes))
    counts = tuple(grid[axis] for axis in axes)
    order = tuple(cut.axes.index(axis) for axis in axes)
    pieces = [joined(run for run in cut.pieces.intervals(i) if run[0] < run[1]) for i in range(cut.pieces.count)]
    wanted = reordered(pieces, tuple(grid[axis] for axis in cut.axes), order)
    stretches = len(cut.pieces.blocks) if isinstance(cut.pieces, Blocked) else 1
    majors = {axis: [major for major in cut.axes[:place] if major > axis] for place, axis in enumerate(cut.axes)}
    usual = tuple(stretches * math.prod(grid[major] for major in majors[axis]) for axis in axes)
    odd = product(range(1, _TRIED.get(len(axes), 1) + 1), repeat=len(axes))
    for blocks in chain((usual,), odd):
        if nested_parts(cut.pieces.length, counts, blocks) == wanted:
            return dict(zip(axes, blocks, strict=True))
    return None


def _meant(layout: Layout, rank: int) -> tuple[object, ...]:
    """The boxes of a rank without the empty ones, whose place means nothing."""
    return tuple(box for box in layout.boxes(rank) if box.numel)


def _dim_cut(length: int, cuts: Sequence[tuple[int, int]], sizes: tuple[int, ...]) -> DimCut:
    axes = tuple(axis for axis, _ in cuts)
    counts = tuple(sizes[axis] for axis in axes)
    order, pieces = _pieces(length, counts, tuple(blocks for _, blocks in cuts))
    return DimCut(tuple(axes[i] for i in order), pieces)


@lru_cache(maxsize=1024)
def _pieces(length: int, counts: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[tuple[int, ...], Pieces]:
    """The pieces of a dim that is cut again and again, and the order of the cuts in which they are easiest to say."""
    natural = tuple(range(len(counts)))
    if len(counts) == 1 and blocks == (1,):
        return natural, chunked(length, counts[0])
    parts = nested_parts(length, counts, blocks)
    said = [(order, as_pieces(length, reordered(parts, counts, order))) for order in permutations(natural)]
    return min(said, key=lambda pair: len(pair[1].blocks) if isinstance(pair[1], Blocked) else 1)
