"""`holders` finds the ranks that a search of all ranks finds, and does not take the time of one."""

from __future__ import annotations

import math
import time

import attrs
import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import MESH, axis_specs, device_specs, elements, parts

from shardtensor.layout.bind import bind
from shardtensor.layout.box import Box, whole
from shardtensor.layout.holders import holders, replica_count
from shardtensor.layout.layout import DimCut, FlatLayout, Layout, MeshLayout
from shardtensor.layout.pieces import Blocked, listed
from shardtensor.mesh import Mesh, coordinate
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Cut, Replicate, Spec


def searched(layout: Layout, box: Box, copy: int) -> list[int]:
    """The same by a search of all ranks: those of one replica whose boxes overlap `box`."""
    free = [axis for axis in range(len(layout.grid)) if axis not in layout.sharding_axes]
    found = []
    for rank in layout.ranks:
        place = coordinate(layout.ranks, layout.grid, rank)
        index = 0
        for axis in free:
            index = index * layout.grid[axis] + place[axis]
        if index == copy and any(held.overlap(box) is not None for held in layout.boxes(rank)):
            found.append(rank)
    return found


def check(layout: Layout, box: Box) -> None:
    for copy in range(replica_count(layout)):
        found = holders(layout, box, copy)
        assert sorted(found) == sorted(searched(layout, box, copy)), (layout, box, copy)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box of a shape, perhaps empty, now and then one that ends outside of it."""
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size + 1)))) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def flat_layouts(draw: st.DrawFn) -> FlatLayout:
    """Ranges over one or two axes of a grid of three, of an inner tensor that is cut, perhaps in blocks, or whole."""
    grid = tuple(draw(st.lists(st.integers(1, 5), min_size=3, max_size=3)))
    axes = draw(st.permutations(range(3)))
    shape = [draw(st.integers(0, 6)) for _ in range(draw(st.integers(1, 3)))]
    dims: list[DimCut | None] = [None] * len(shape)
    dim = draw(st.integers(-1, len(shape) - 1))
    if dim >= 0:
        sizes = draw(st.lists(parts(6, grid[axes[2]]), min_size=1, max_size=2))
        blocks = tuple(map(listed, sizes))
        dims[dim] = DimCut((axes[2],), Blocked(blocks) if len(blocks) > 1 else blocks[0])
        shape[dim] = 6 * len(blocks)
    about = {"shape": tuple(shape), "ranks": range(2, 2 + math.prod(grid)), "grid": grid}
    inner = MeshLayout(**about, dims=tuple(dims))
    cut = tuple(axes[: draw(st.integers(1, 2))])
    layout = FlatLayout(**about, inner=inner, axes=cut, unit=draw(st.integers(0, 4)))
    if dim < 0 and draw(st.booleans()):
        total, count = math.prod(shape), math.prod(grid[axis] for axis in cut)
        layout = attrs.evolve(layout, sizes=draw(parts(total, count)))
    return layout


@examples(500)
@given(st.one_of(device_specs(), axis_specs()), st.data())
def test_holders_of_any_spec_are_those_that_a_search_finds(case, data):
    spec, shape = case
    check(bind(spec, shape, MESH), data.draw(boxes(shape)))


@examples(500)
@given(flat_layouts(), st.data())
def test_holders_of_flat_ranges_are_those_that_a_search_finds(layout, data):
    check(layout, data.draw(boxes(layout.shape)))


@examples(100)
@given(st.one_of(device_specs(), axis_specs()))
def test_an_element_has_one_holder_in_each_copy(case):
    spec, shape = case
    layout = bind(spec, shape, MESH)
    for element in elements(whole(shape)):
        point = Box(element, (1,) * len(shape))
        found = [holders(layout, point, copy) for copy in range(replica_count(layout))]
        assert [len(ranks) for ranks in found] == [1] * replica_count(layout)
        assert layout.holds_first_copy(found[0][0])
        held = {rank for rank in layout.ranks if any(box.overlap(point) for box in layout.boxes(rank))}
        assert held == {rank for ranks in found for rank in ranks}


@pytest.mark.parametrize(
    "spec", [Replicate(), Spec().flat("dp"), Spec().flat("tp", sizes=(0, 1, 0)), Spec().only("tp", 2)], ids=str
)
def test_a_scalar_has_one_holder_in_each_copy(spec):
    layout = bind(spec, (), MESH)
    found = [holders(layout, Box((), ()), copy) for copy in range(replica_count(layout))]
    assert all(len(ranks) == 1 for ranks in found)
    assert {rank for ranks in found for rank in ranks} == {rank for rank in layout.ranks if layout.boxes(rank)}


def test_ranks_in_any_order_are_found():
    layout = bind(ChunkShardingSpec(0, ["rank:5/cpu", "rank:0/cpu", "rank:3/cpu"]), (6, 2), MESH)
    assert [holders(layout, Box((start, 0), (2, 1))) for start in (0, 1, 4)] == [(5,), (5, 0), (3,)]
    twice = bind(ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu", "rank:1/cpu"]), (6, 2), MESH)
    assert holders(twice, whole((6, 2))) == (1, 0)


def test_empty_shards_hold_nothing():
    mesh = Mesh((("tp", 4),))
    cut = bind(Spec(Cut("tp", sizes=(0, 2, 0, 3))), (5,), mesh)
    flat = bind(Spec(None).flat("tp", sizes=(2, 0, 0, 3)), (5,), mesh)
    assert [holders(cut, Box((start,), (2,))) for start in (0, 1, 2)] == [(1,), (1, 3), (3,)]
    assert [holders(flat, Box((start,), (2,))) for start in (0, 1, 2)] == [(0,), (0, 3), (3,)]


def test_shards_between_two_rows_of_a_box_hold_nothing_of_it():
    layout = bind(Spec(None, None).flat("tp"), (2, 6), Mesh((("tp", 4),)))
    found = [holders(layout, Box((0, start), (2, size))) for start, size in ((0, 1), (0, 4), (2, 1), (3, 3), (5, 1))]
    assert found == [(0, 2), (0, 1, 2, 3), (0, 2), (1, 3), (1, 3)]


RANKS = 16_384
GRID = Mesh((("dp", RANKS // 8), ("tp", 8)))


@pytest.mark.parametrize(
    "spec",
    [
        Spec().flat("dp", "tp"),
        Spec(None, "tp").flat("dp"),
        Spec("tp", None).flat("dp", unit=64),
        Spec(("dp", "tp"), None),
        Spec(Cut(("tp", "dp"), balanced=True), None),
        Spec(Cut("dp", blocks=4), "tp"),
        Spec("tp", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [range(RANKS), tuple(reversed(range(RANKS)))], ids=["range", "tuple"])
def test_the_holders_of_a_box_of_one_of_many_ranks_are_found_at_once(spec, ranks):
    layout = bind(spec, (32_768, 512), Mesh(GRID.axes, ranks))
    for rank in (0, 1234, RANKS - 1):
        for box in layout.boxes(rank)[:2]:
            start = time.perf_counter()
            found = holders(layout, box)
            seconds = time.perf_counter() - start
            assert (rank in found) == layout.holds_first_copy(rank)
            assert len(found) == 1
            assert seconds < 0.02


def test_a_column_is_found_in_the_time_of_its_holders():
    layout = bind(Spec(None, None, None).flat("dp", "tp"), (2, 8192, 64), GRID)
    start = time.perf_counter()
    found = holders(layout, Box((0, 7, 63), (2, 1, 1)))
    assert time.perf_counter() - start < 0.02
    assert found == (7, 8192 + 7)


def test_listed_boxes_are_found_by_a_search():
    spec = EnumerableShardingSpec(
        [
            ShardMetadata((0, 0), (2, 4), "rank:4/cpu"),
            ShardMetadata((2, 0), (2, 1), "rank:1/cpu"),
            ShardMetadata((2, 1), (2, 3), "rank:4/cpu"),
        ]
    )
    layout = bind(spec, (4, 4), MESH)
    assert holders(layout, Box((1, 0), (2, 1))) == (4, 1)
    assert holders(layout, Box((2, 1), (1, 1))) == (4,)
    assert (replica_count(layout), holders(layout, Box((1, 0), (0, 3)))) == (1, ())
