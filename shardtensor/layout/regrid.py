"""A layout seen over the axes of another mesh of the same ranks."""

from __future__ import annotations

import math
from itertools import pairwise

import attrs

from shardtensor.layout.layout import CutLayout, DimCut, Layout
from shardtensor.mesh import Mesh


def on_mesh(layout: Layout, mesh: Mesh) -> Layout | None:
    """The same layout over the axes of a mesh of the same ranks in the same order; None where an axis of the mesh
    would cut and hold copies at once.

    An axis of the layout may be several of the mesh, and the other way round. Boxes written out have no axes.
    """
    if not isinstance(layout, CutLayout):
        return layout if set(layout.ranks) <= set(mesh.ranks) else None
    if layout.ranks != mesh.ranks:
        return None
    if layout.grid == mesh.sizes:
        return layout
    fine = _common_sizes(layout.grid, mesh.sizes)
    if fine is None:
        return None
    of_layout, of_mesh = fine
    cuts = [None if cut is None else [part for axis in cut.axes for part in of_layout[axis]] for cut in layout.dims]
    partial = {part: op for axis, op in layout.partial for part in of_layout[axis]}
    first = {parts[0]: axis for axis, parts in enumerate(of_mesh) if parts}
    dims: list[DimCut | None] = []
    for old, parts in zip(layout.dims, cuts, strict=True):
        if old is None or parts is None:
            dims.append(None)
            continue
        axes, rest = [], list(parts)
        while rest:
            axis = first.get(rest[0])
            if axis is None or rest[: len(of_mesh[axis])] != of_mesh[axis]:
                return None
            axes.append(axis)
            rest = rest[len(of_mesh[axis]) :]
        dims.append(DimCut(tuple(axes), old.pieces))
    addends = []
    for axis, parts in enumerate(of_mesh):
        ops = {partial.get(part) for part in parts}
        if len(ops) > 1:
            return None
        op = next(iter(ops), None)
        if op is not None:
            addends.append((axis, op))
    return attrs.evolve(layout, grid=mesh.sizes, dims=tuple(dims), partial=tuple(addends), names=mesh.names)


def _common_sizes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[list[list[int]], list[list[int]]] | None:
    """For each axis of two grids, which of the finest axes that both are made of it is; None where they do not line up.

    Axes of size 1 are made of none.
    """
    inner = [[math.prod(sizes[i:]) for i in range(len(sizes) + 1)] for sizes in (one, other)]
    marks = sorted({mark for marks in inner for mark in marks}, reverse=True)
    if any(a % b for a, b in pairwise(marks)):
        return None

    def parts(bounds: list[int]) -> list[list[int]]:
        return [list(range(marks.index(a), marks.index(b))) for a, b in pairwise(bounds)]

    return parts(inner[0]), parts(inner[1])
