"""Gathered locals, put where the assembly says, are the whole tensor. In lists of integers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import MESH, axis_specs, device_specs, elements

from shardtensor.layout.assembly import assembly
from shardtensor.layout.bind import bind
from shardtensor.layout.box import Box
from shardtensor.layout.layout import Layout
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import ChunkShardingSpec
from shardtensor.spec.nodes import Cut, Replicate, Spec


def flat_index(shape: tuple[int, ...], element: tuple[int, ...]) -> int:
    index = 0
    for size, i in zip(shape, element, strict=True):
        index = index * size + i
    return index


def indices(shape: tuple[int, ...], box: Box) -> list[int]:
    return [flat_index(shape, element) for element in elements(box)]


def local_of(layout: Layout, rank: int) -> list[int]:
    """The local tensor, flat, of the tensor whose elements are their own row-major numbers."""
    local = [-1] * layout.numel(rank)
    for here, there in zip(layout.local_boxes(rank), layout.boxes(rank), strict=True):
        for place, value in zip(indices(layout.local_shape(rank), here), indices(layout.shape, there), strict=True):
            local[place] = value
    return local


def gathered(layout: Layout, members: tuple[int, ...]) -> list[int]:
    plan = assembly(layout, members)
    sent = [local_of(layout, rank)[:count] for rank, count in zip(members, plan.counts, strict=True)]
    flat = [value for part in sent for value in part]
    if plan.in_order:
        return flat
    out = [-1] * math.prod(layout.shape)
    for piece in plan.contributions:
        local = flat[piece.start : piece.start + math.prod(piece.local_shape)]
        for here, there in zip(piece.local_boxes, piece.boxes, strict=True):
            for place, to in zip(indices(piece.local_shape, here), indices(layout.shape, there), strict=True):
                out[to] = local[place]
    return out


@settings(max_examples=250, deadline=None)
@given(st.one_of(device_specs(), axis_specs()))
def test_gathered_locals_are_the_whole(case):
    spec, shape = case
    layout = bind(spec, shape, MESH)
    members = tuple(MESH.ranks)
    assert gathered(layout, members) == list(range(math.prod(shape)))
    assert sum(assembly(layout, members).counts) == math.prod(shape)  # nothing travels twice


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        pytest.param(Spec("tp", None), (1,), id="along tp"),
        pytest.param(Spec(None, Cut("dp", balanced=True)), (0,), id="along dp"),
        pytest.param(Replicate().flat("tp"), (1,), id="flat along tp"),
    ],
)
def test_the_ranks_along_the_parting_axes_are_enough(spec, axes):
    layout = bind(spec, (6, 5), MESH)
    assert layout.parting_axes == axes
    for rank in MESH.ranks:
        assert gathered(layout, MESH.ranks_along(rank, axes)) == list(range(30))


def test_what_is_in_order_needs_no_copy():
    members = tuple(MESH.ranks)
    in_order = [ChunkShardingSpec(0, ["rank:0-5/cpu"]), Spec("tp", None), Replicate().flat("dp", "tp")]
    moved = [
        ChunkShardingSpec(1, ["rank:0-5/cpu"]),
        ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in reversed(range(6))]),
        Spec(Cut("tp", blocks=2), None),
    ]
    assert all(assembly(bind(spec, (6, 6), MESH), members).in_order for spec in in_order)
    assert not any(assembly(bind(spec, (6, 6), MESH), members).in_order for spec in moved)


def test_one_of_two_copies_travels():
    layout = bind(Spec("tp"), (6,), Mesh((("dp", 2), ("tp", 3))))
    assert assembly(layout, tuple(range(6))).counts == (2, 2, 2, 0, 0, 0)
    assert assembly(layout, (3, 4, 5)).counts == (2, 2, 2)
