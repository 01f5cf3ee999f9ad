"""The boxes of all ranks tile the tensor, whatever the spec, and local tensors hold them in the order they say."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import MESH, axis_specs, device_specs, elements, places

from shardtensor.layout.bind import bind
from shardtensor.layout.box import Box, get_chunk_sharding_params, get_chunked_dim_size, get_split_size, runs, whole
from shardtensor.layout.cutting import axis_form
from shardtensor.layout.layout import FlatLayout, Layout, ListedLayout, MeshLayout, has_equal_parts, same_boxes
from shardtensor.layout.pieces import Blocked, balanced, chunked, listed, padded
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Cut, Replicate, Spec


def check(layout: Layout) -> None:
    """Every element is held equally often, and each rank's boxes fill its local tensor without overlap."""
    held: Counter[tuple[int, ...]] = Counter()
    for rank in layout.ranks:
        boxes = layout.boxes(rank)
        local = layout.local_boxes(rank)
        assert [box.numel for box in boxes] == [box.numel for box in local]
        assert layout.numel(rank) == sum(box.numel for box in boxes)
        if not layout.packed:
            assert [box.sizes for box in boxes] == [box.sizes for box in local]
        filled = Counter(element for box in local for element in elements(box))
        assert set(filled.values()) <= {1}
        assert all(element in elements(whole(layout.local_shape(rank))) for element in filled)
        held.update(element for box in boxes for element in elements(box))
    if not layout.shape and isinstance(layout, ListedLayout):
        assert set(held) == {()}
        return
    copies = len(layout.ranks) // math.prod(layout.grid[axis] for axis in layout.sharding_axes)
    assert held == dict.fromkeys(elements(whole(layout.shape)), copies)
    outside = max(layout.ranks) + 1
    assert layout.boxes(outside) == layout.local_boxes(outside) == ()
    assert layout.numel(outside) == 0 or not layout.shape


@examples(250)
@given(st.one_of(device_specs(), axis_specs()))
def test_boxes_of_all_ranks_tile_the_tensor(case):
    spec, shape = case
    check(bind(spec, shape, MESH))


@pytest.mark.parametrize(
    "spec",
    [
        Replicate(),
        Spec().flat("dp"),
        Spec().flat("dp", "tp", unit="row"),
        Spec().flat("tp", sizes=(0, 1, 0)),
        Spec().only("tp", 2),
        Spec().partial("dp"),
    ],
    ids=str,
)
def test_scalars(spec):
    check(bind(spec, (), MESH))


@examples(100)
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_cuts_as_torch_does(length, count):
    torch = pytest.importorskip("torch")
    layout = bind(ChunkShardingSpec(0, places(count)), (length, 2), Mesh((("*", count),)))
    sizes = [len(chunk) for chunk in torch.arange(length).chunk(count)]
    found = [layout.boxes(rank)[0] for rank in range(count)]
    assert [box.sizes[0] for box in found] == (sizes + [0] * count)[:count]
    assert {box.offsets[0] for box in found if not box.numel} <= {length}
    split = get_split_size(length, count)
    assert [get_chunked_dim_size(length, split, rank) for rank in range(count)] == [box.sizes[0] for box in found]
    params = [get_chunk_sharding_params(length, count, ChunkShardingSpec(0, places(count)), r) for r in range(count)]
    assert params == [(box.offsets[0], box.sizes[0]) for box in found]


@pytest.mark.parametrize(
    ("cut", "length", "expected"),
    [
        pytest.param(Cut("tp"), 9, [(0, 3), (3, 6), (6, 9)], id="even"),
        pytest.param(Cut("tp", balanced=True), 5, [(0, 2), (2, 4), (4, 5)], id="balanced"),
        pytest.param(Cut("tp", balanced=True, unit=4), 8, [(0, 4), (4, 8), (8, 8)], id="balanced units"),
        pytest.param(Cut("tp", pad=8), 20, [(0, 8), (8, 16), (16, 20)], id="pad"),
        pytest.param(Cut("tp", pad=8), 9, [(0, 8), (8, 9), (9, 9)], id="pad, empty"),
        pytest.param(Cut("tp", pad=4, unit=2), 12, [(0, 4), (4, 8), (8, 12)], id="pad of whole units"),
        pytest.param(Cut("tp", sizes=(0, 5, 1)), 6, [(0, 0), (0, 5), (5, 6)], id="sizes"),
    ],
)
def test_intervals_of_each_cut(cut, length, expected):
    layout = bind(Spec(cut), (length,), Mesh((("tp", 3),)))
    assert [(b.offsets[0], b.ends[0]) for r in range(3) for b in layout.boxes(r)] == expected


def test_blocks_are_cut_one_by_one():
    layout = bind(Spec(Cut("tp", blocks=(2, 1, 1))), (12,), Mesh((("tp", 3),)))
    assert [list(map(str, layout.boxes(r))) for r in range(3)] == [
        ["[0:2]", "[6:7]", "[9:10]"],
        ["[2:4]", "[7:8]", "[10:11]"],
        ["[4:6]", "[8:9]", "[11:12]"],
    ]
    assert list(map(str, layout.local_boxes(1))) == ["[0:2]", "[2:3]", "[3:4]"]


def test_several_axes_cut_a_dim_major_to_minor():
    def starts(*axes: str) -> list[int]:
        return [bind(Spec(axes), (6,), MESH).boxes(rank)[0].offsets[0] for rank in range(6)]

    assert starts("dp", "tp") == [0, 1, 2, 3, 4, 5]
    assert starts("tp", "dp") == [0, 2, 4, 1, 3, 5]


def test_flat_over_blocks_keeps_the_order_of_memory():
    layout = bind(Spec(None, Cut("tp", blocks=2)).flat("dp"), (3, 8), Mesh((("dp", 2), ("tp", 2))))
    assert list(map(str, layout.boxes(3))) == ["[1:2, 6:8]", "[2:3, 2:4]", "[2:3, 6:8]"]


def test_a_row_is_an_index_of_the_first_dim():
    mesh = Mesh((("dp", 2), ("tp", 2)))
    layout = bind(Spec(None, None, None).flat("dp", unit="row"), (3, 2, 5), mesh)
    assert [layout.span(rank) for rank in mesh.ranks] == [(0, 20), (0, 20), (20, 30), (20, 30)]
    cut = bind(Spec(None, "tp", None).flat("dp", unit="row"), (3, 2, 5), mesh)
    assert [list(map(str, cut.boxes(rank))) for rank in (1, 3)] == [["[0:2, 1:2, 0:5]"], ["[2:3, 1:2, 0:5]"]]


def test_dims_that_an_ellipsis_stands_for_stay_whole():
    for shape, dims in (((6, 2, 3, 4), ("tp", None, None, "dp")), ((6, 4), ("tp", "dp"))):
        assert bind(Spec("tp", ..., "dp"), shape, MESH) == bind(Spec(*dims), shape, MESH)
    assert bind(Spec(...), (), MESH) == bind(Replicate(), (), MESH)


def test_a_grid_cuts_the_dims_that_it_splits_and_one_of_one_place_is_no_copy():
    grid = bind(GridShardingSpec((1, 2), places(2)), (4, 6), MESH)
    assert grid.cut_dims == (1,)
    one = bind(GridShardingSpec((1, 1), places(1)), (4, 6), MESH)
    assert (one.cut_dims, one.is_replicated, list(map(str, one.boxes(0)))) == ((0,), False, ["[0:4, 0:6]"])


@examples(200)
@given(st.one_of(device_specs(), axis_specs()))
def test_what_is_asked_of_a_layout_follows_from_its_boxes(case):
    spec, shape = case
    layout = bind(spec, shape, MESH)
    assert has_equal_parts(layout) == (len({layout.numel(rank) for rank in layout.ranks}) == 1)
    if isinstance(layout, MeshLayout):
        for dim in range(len(shape)):
            if not layout.is_blocked(dim):
                starts = [[box.offsets[dim] for box in layout.boxes(rank)][:1] or [0] for rank in range(-1, MESH.size)]
                assert [[layout.start(rank, dim)] for rank in range(-1, MESH.size)] == starts
            elif all(layout.boxes(rank) for rank in layout.ranks):
                assert isinstance(spec, Spec)
                assert spec.dims[dim].blocks != 1


def test_blocks_of_a_dim_are_known_as_such():
    layout = bind(Spec(Cut("tp", blocks=2), "dp", None), (6, 2, 2), MESH)
    assert [layout.is_blocked(dim) for dim in range(3)] == [True, False, False]


@examples(200)
@given(axis_specs())
def test_a_layout_said_in_axes_means_the_same(case):
    spec, shape = case
    layout = bind(spec, shape, MESH)
    if layout.ranks == MESH.ranks and all(cut is None or cut.blocks == 1 for cut in spec.dims):
        assert same_boxes(bind(axis_form(layout), shape, MESH), layout)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Spec("tp", None), "[tp, -]"),
        (Spec(("tp", "dp"), None), "[tp*dp, -]"),
        (Spec(Cut("tp", pad=4), None), "[tp sizes(4, 2, 0), -]"),
        (Spec(Cut("tp", sizes=(1, 2, 3)), None), "[tp sizes(1, 2, 3), -]"),
        (Spec(None, Cut("dp", balanced=True, unit=6)), "[-, dp unit(6) balanced]"),
        (Spec(None, Cut("dp", blocks=2, balanced=True)), "[-, dp blocks(2) balanced]"),
        (Spec(Cut("tp", blocks=(2, 1), balanced=True), None), "[tp blocks(2, 1) balanced, -]"),
        (Spec(None, Cut("tp", blocks=(2, 1))), "[-, tp blocks(2, 1)]"),
        (Spec(None, "tp").flat("dp"), "[-, tp] flat(dp)"),
        (Spec("tp", None).flat("dp", unit="row"), "[tp, -] flat(dp, unit=row)"),
        (Spec(None, None).flat("dp", unit=2), "flat(dp, unit=2)"),
        (Spec(None, None).flat("dp", sizes=(100, 8)), "flat(dp, sizes=(100, 8))"),
        (Replicate().partial("tp", op="max"), "replicate partial(tp, op=max)"),
        (Spec("dp", None).partial("tp"), "[dp, -] partial(tp)"),
    ],
    ids=str,
)
def test_layouts_are_said_in_the_shortest_words(given, said):
    shape = (6, 18)
    assert str(axis_form(bind(given, shape, MESH))) == said


def test_axes_without_names_are_counted():
    assert str(axis_form(bind(ChunkShardingSpec(1, places(3)), (4, 6), MESH))) == "[-, axis0]"


@examples(200)
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_runs_cover_a_flat_range_in_order(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    cut = runs(start, stop, tuple(shape))
    order = {element: i for i, element in enumerate(elements(whole(tuple(shape))))}
    assert [order[element] for box in cut for element in elements(box)] == list(range(start, stop))
    assert len(cut) <= max(1, 2 * len(shape) - 1)


def test_several_boxes_of_a_rank_are_packed_end_to_end():
    spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu", "rank:1/cpu"])
    layout = bind(spec, (5, 2), Mesh((("*", 2),)))
    assert layout.packed
    assert layout.local_shape(1) == (6,)
    assert list(map(str, layout.boxes(1))) == ["[0:2, 0:2]", "[4:5, 0:2]"]
    assert list(map(str, layout.local_boxes(1))) == ["[0:4]", "[4:6]"]


def test_box_algebra():
    a, b = Box((0, 2), (3, 4)), Box((2, 0), (4, 3))
    assert a.overlap(b) == b.overlap(a) == Box((2, 2), (1, 1))
    assert a.overlap(Box((3, 2), (1, 1))) is None
    assert (a.ends, a.numel, str(a)) == ((3, 6), 12, "[0:3, 2:6]")


# -- equality --------------------------------------------------------------------------------------------------------


def test_equal_cuts_are_equal_layouts():
    mesh = Mesh((("*", 2),))
    chunk = bind(ChunkShardingSpec(0, places(2)), (4, 3), mesh)
    listed = [
        EnumerableShardingSpec([ShardMetadata([r * 2, 0], [2, 3], f"rank:{r}/cpu") for r in (1, 0)]),
        ChunkShardingSpec(-2, places(2), sizes=(2, 2)),
        Spec("tp", None),
    ]
    assert all(bind(spec, (4, 3), mesh) == chunk for spec in listed)
    grid = bind(GridShardingSpec((2, 1), places(2)), (4, 3), mesh)
    assert same_boxes(grid, chunk)
    assert not same_boxes(chunk, bind(ChunkShardingSpec(1, places(2)), (4, 3), mesh))
    assert not same_boxes(chunk, bind(ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), (4, 3), mesh))
    assert not same_boxes(chunk, bind(ChunkShardingSpec(0, places(2)), (4, 2), mesh))


def test_same_boxes_compares_what_is_left_to_reduce():
    plain, total = bind(Replicate(), (4,), MESH), bind(Replicate().partial("tp"), (4,), MESH)
    assert not same_boxes(plain, total)
    assert not same_boxes(total, bind(Replicate().partial("tp", op="max"), (4,), MESH))
    assert same_boxes(total, bind(Spec(None).partial("tp"), (4,), MESH))
    assert same_boxes(total.reduced(), plain)
    assert not total.is_replicated
    assert plain.is_replicated


def test_one_rank_of_a_sum_brings_a_new_value():
    layout = bind(Spec("dp").partial("tp"), (4,), MESH)
    assert [layout.holds_full_value(rank) for rank in range(6)] == [True, False, False] * 2
    assert all(bind(Spec("dp").partial("tp", op="avg"), (4,), MESH).holds_full_value(rank) for rank in range(6))


def test_kinds():
    assert isinstance(bind(Spec("tp"), (6,), MESH), MeshLayout)
    assert isinstance(bind(Spec("tp").flat("dp"), (6,), MESH), FlatLayout)
    assert isinstance(bind(Spec("tp").only("dp", 1), (6,), MESH), MeshLayout)
    assert isinstance(bind(ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/cpu"]), (6,), MESH), ListedLayout)


def test_only_leaves_the_other_ranks_empty():
    layout = bind(Replicate().only("tp", 1), (6,), MESH)
    assert [layout.numel(rank) for rank in MESH.ranks] == [0, 6, 0, 0, 6, 0]
    assert not layout.is_replicated
    assert layout.sharding_axes == (1,)
    flat = bind(Replicate().flat("dp").only("tp", 1), (6,), MESH)
    assert [flat.numel(rank) for rank in MESH.ranks] == [0, 3, 0, 0, 3, 0]


# -- cost ------------------------------------------------------------------------------------------------------------


def _seconds(world: int) -> float:
    """The best time to bind ten specs that no cache has seen and ask for two boxes of each."""
    mesh = Mesh((("*", world),))
    best = math.inf
    for attempt in range(20):
        specs = [ChunkShardingSpec(0, [f"rank:0-{world - 1}/cpu"]) for _ in range(10)]
        start = time.perf_counter()
        for i, spec in enumerate(specs):
            layout = bind(spec, (world * 4, attempt * 10 + i + 1), mesh)
            layout.boxes(0), layout.local_shape(world - 1)
        best = min(best, time.perf_counter() - start)
    return best


def test_binding_costs_the_same_at_16384_ranks():
    _seconds(8)
    assert _seconds(16384) < 3 * _seconds(8)  # O(ranks) would be a thousand times


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec("tp", None), "[tp, -]"),
        (Spec(Cut("tp", balanced=True), "dp").partial("pp"), "[tp, dp] partial(pp)"),
        (Spec(("tp", "dp"), None).partial("pp", op="max"), "[tp*dp, -] partial(pp, op=max)"),
        (Spec(None, None).flat("dp", "tp"), "[-, -] flat(dp*tp)"),
        (ChunkShardingSpec(1, ["rank:0-1/cpu"]), "[-, axis0]"),
        (EnumerableShardingSpec([ShardMetadata([0, 0], [2, 8], "rank:1"), ShardMetadata([2, 0], [6, 4], "rank:0"),
                                 ShardMetadata([2, 4], [6, 4], "rank:1")]), "3 boxes on 2 ranks"),
    ],
)  # fmt: skip
def test_messages_say_a_layout_by_its_cuts(spec, text):
    mesh = Mesh((("dp", 2), ("tp", 2), ("pp", 2)))
    assert str(bind(spec, (8, 8), mesh)) == text


def test_first_copies_hold_every_element_once():
    mesh = Mesh((("dp", 2), ("tp", 2)))
    for spec in (Spec("tp", None), Spec("dp", "tp"), Replicate(), Spec(None, None).flat("dp")):
        layout = bind(spec, (4, 4), mesh)
        boxes = [box for rank in mesh.ranks if layout.holds_first_copy(rank) for box in layout.boxes(rank)]
        assert sorted(e for box in boxes for e in elements(box)) == elements(whole((4, 4))), spec
        assert layout.is_whole_on_all(4) == (spec == Replicate())
        assert not layout.holds_first_copy(9)
        assert layout.holds_first_copy(0), "the first replica, not any one"


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_pieces_are_even_when_all_have_one_size(length, count, unit, sizes):
    kinds = [chunked(length, count), balanced(length * unit, count, unit), padded(length, count, unit, 1)]
    kinds += [listed(tuple(sizes)), Blocked((chunked(length, count), balanced(length * unit, count, unit)))]
    kinds.append(Blocked((listed((1, 2)), listed((2, 1)))))
    for pieces in kinds:
        assert pieces.is_even == (len({pieces.size(i) for i in range(pieces.count)}) == 1), pieces


def test_one_other_size_among_many_is_seen():
    sizes = [2] * 6000
    sizes[9] = 3
    assert not listed(tuple(sizes)).is_even


def test_empty_shards_of_several_ranks_are_no_grid():
    for ranks in ((0, 1, 2), (1, 2, 0)):
        sizes = dict(zip(ranks, ([4, 4], [0, 4], [0, 4]), strict=True))
        shards = [ShardMetadata([4 - size[0], 0], size, f"rank:{rank}/cpu") for rank, size in sizes.items()]
        layout = bind(EnumerableShardingSpec(shards), (4, 4), Mesh((("x", 3),)))
        assert {rank: list(layout.local_shape(rank)) for rank in range(3)} == sizes
        assert set(layout.ranks) == {0, 1, 2}
