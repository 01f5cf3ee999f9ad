"""Every kind of cut layout of a shape on one grid, and the part of a tensor that a rank holds: for brute force."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

import torch

from shardtensor.layout.layout import DimCut, Layout, MeshLayout, replicated
from shardtensor.layout.pieces import Blocked, Pieces, balanced, chunked, listed, padded
from shardtensor.mesh import Mesh

MESH = Mesh((("dp", 2), ("tp", 3)), ranks=(4, 0, 5, 1, 3, 2))
OUTSIDE = 6
"""A rank that is none of the grid."""


def part(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The local tensor of a rank, dims cut in blocks included."""
    local = full.new_empty(layout.local_shape(rank))
    for here, there in zip(layout.local_boxes(rank), layout.boxes(rank), strict=True):
        local[here.slices] = full[there.slices].reshape(local[here.slices].shape)
    return local


def pieces(length: int, count: int) -> list[Pieces]:
    """Every way to cut a dim: as torch.chunk does, balanced, padded, uneven with empty pieces, in blocks."""
    uneven = (min(1, length), *(0,) * (count - 2), length - min(1, length))
    all_on_first = (length, *(0,) * (count - 1))
    third = length // 3
    found = [
        chunked(length, count),
        balanced(length, count, 1),
        padded(length, count, 2, 1),
        listed(uneven),
        listed(all_on_first),
        Blocked((chunked(length - third, count), balanced(third, count, 1))),
    ]
    if length % 2 == 0:
        found.append(Blocked((chunked(length // 2, count),) * 2))
    return list(dict.fromkeys(found))


def cut_layout(shape: tuple[int, ...], *dims: DimCut | None) -> MeshLayout:
    """A layout of a shape over the grid."""
    return MeshLayout(shape=shape, ranks=MESH.ranks, grid=MESH.sizes, names=MESH.names, dims=dims)


def over(axes: tuple[int, ...], length: int) -> list[DimCut]:
    """The ways to cut a dim over axes."""
    return [DimCut(axes, each) for each in pieces(length, math.prod(MESH.sizes[axis] for axis in axes))]


def cut_once(shape: tuple[int, ...]) -> Iterator[MeshLayout]:
    """The layouts of which one dim is cut."""
    for dim, axes in product(range(len(shape)), ((0,), (1,), (1, 0))):
        for cut in over(axes, shape[dim]):
            yield cut_layout(shape, *(cut if d == dim else None for d in range(len(shape))))


def cut_twice(shape: tuple[int, ...]) -> Iterator[MeshLayout]:
    """Layouts of which two dims are cut, each kind of cut of either dim in one of them at least."""
    for first, second in product(range(len(shape)), repeat=2):
        if first == second:
            continue
        ones, others = over((0,), shape[first]), over((1,), shape[second])
        for k in range(max(len(ones), len(others))):
            pair = {first: ones[k % len(ones)], second: others[(k + 1) % len(others)]}
            yield cut_layout(shape, *(pair.get(d) for d in range(len(shape))))


def cut_layouts(shape: tuple[int, ...]) -> list[MeshLayout]:
    """Copies, and all of these."""
    return [replicated(shape, MESH.ranks, MESH.sizes), *cut_once(shape), *cut_twice(shape)]


@cache
def counted_part(layout: Layout, rank: int) -> torch.Tensor:
    """What a rank holds of `counted`."""
    return part(counted(layout.shape), layout, rank)


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of which no two elements are alike."""
    return torch.arange(math.prod(shape)).view(shape)
