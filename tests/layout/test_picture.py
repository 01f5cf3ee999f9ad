"""Pictures of layouts: cells show who holds them, and ranks of a shard hold the same."""

from __future__ import annotations

from itertools import product

import pytest

from shardtensor.layout.bind import bind
from shardtensor.layout.picture import EVERYBODY, picture_of
from shardtensor.mesh import read_mesh
from shardtensor.spec.parse import parse_spec

CASES = [
    ("replicate", (4, 6), "tp=4"),
    ("[tp, -]", (8, 6), "dp=2, tp=4"),
    ("[-, tp balanced]", (3, 7), "tp=4"),
    ("[tp balanced]", (2,), "tp=5"),
    ("[dp, tp]", (6, 8), "dp=3, tp=4"),
    ("[tp*dp, -]", (16, 2), "dp=2, tp=4"),
    ("[tp blocks(3), -]", (24, 5), "dp=2, tp=4"),
    ("[tp blocks(2), dp]", (8, 6), "dp=3, tp=2"),
    ("[dp, ep, tp]", (4, 4, 6), "dp=2, ep=2, tp=3"),
    ("[-, -, tp]", (2, 3, 8), "tp=2"),
    ("flat(dp)", (5, 4, 3), "dp=7"),
    ("[tp, -] flat(dp)", (6, 5), "dp=4, tp=3"),
    ("[-, tp blocks(3)] flat(dp)", (4, 12), "dp=3, tp=2"),
    ("[tp, -] only(ep, 1)", (8, 3), "ep=2, tp=2"),
    ("[tp pad(8), -]", (13, 2), "tp=4"),
    ('chunk(dim=0, placements=["rank:2/cuda:0", "rank:0/cuda:1"])', (5, 2), "4"),
    ('grid(splits=(2, 2), placements=["rank:0-3/cuda:0-3"])', (5, 4), "4"),
    ('enum([0:5, 0:4] @ "rank:0/cuda:0", [5:9, 0:2] @ "rank:2/cpu", [5:9, 2:4] @ "rank:0/cuda:0")', (9, 4), "3"),
    ("replicate", (), "tp=2"),
    ("[tp, -]", (0, 3), "tp=2"),
]


def layout_of(text, shape, mesh):
    return bind(parse_spec(text), shape, read_mesh(int(mesh) if mesh.isdecimal() else mesh))


def cells(boxes):
    return [
        at for box in boxes for at in product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
    ]


@pytest.mark.parametrize(("text", "shape", "mesh"), CASES)
def test_ranks_of_a_shard_hold_the_same_and_every_rank_has_one(text, shape, mesh):
    layout = layout_of(text, shape, mesh)
    picture = picture_of(layout)
    found = [picture.ranks(index, 10**6) for index in range(picture.count)]
    assert sorted(rank for ranks in found for rank in ranks) == sorted(layout.ranks)
    for index, ranks in enumerate(found):
        assert len(ranks) == picture.copies
        assert {picture.index_of(rank) for rank in ranks} == {index}
        assert len({layout.boxes(rank) for rank in ranks}) == 1
    sizes = [layout.numel(rank) for rank in layout.ranks]
    assert picture.ends == (min(sizes), max(sizes))


@pytest.mark.parametrize(("text", "shape", "mesh"), [case for case in CASES if all(case[1])])
def test_each_cell_of_a_map_shows_who_holds_it(text, shape, mesh):
    layout = layout_of(text, shape, mesh)
    picture = picture_of(layout)
    holder = {at: rank for rank in reversed(layout.ranks) for at in cells(layout.boxes(rank))}
    numbers = {at: picture.number(picture.index_of(rank)) if picture.axes else EVERYBODY for at, rank in holder.items()}
    drawn = [number for row in picture.cells() for number in row]
    expected = [numbers[at] for at in product(*map(range, shape))]
    if len(drawn) == len(expected):
        assert drawn == expected
    elif len(picture.cells()) == 1:  # no dim that goes down is sharded
        assert drawn * (len(expected) // len(drawn)) == expected
    else:
        assert set(drawn) <= set(expected)


def test_a_large_tensor_is_shrunk_to_the_map():
    picture = picture_of(layout_of("[tp, -]", (1024, 1024), "tp=2"))
    assert picture.cells() == [[0] * 16] * 2 + [[1] * 16] * 2
    assert len(picture_of(layout_of("[tp, -]", (1024, 1024), "tp=8")).cells()) == 8


def test_a_large_world_takes_no_time():
    picture = picture_of(layout_of("[tp*dp, -] ", (1 << 20, 8), "dp=2048, tp=8"))
    assert (picture.count, picture.place_text(257), picture.ranks(257)) == (16384, "tp 0, dp 257", (2056,))
    assert len(picture.cells()) == 16
    assert [number for number, _ in picture.legend()] == [0, 8, 16383]


def test_the_legend_names_the_first_two_ranks_that_hold_a_shard():
    picture = picture_of(layout_of("[tp, -]", (4, 2), "dp=3, tp=2"))
    assert picture.legend() == [(0, " tp 0, ranks 0, 2, …"), (1, " tp 1, ranks 1, 3, …")]
    pair = picture_of(layout_of("[tp, -]", (4, 2), "dp=2, tp=2"))
    assert pair.legend() == [(0, " tp 0, ranks 0, 2"), (1, " tp 1, ranks 1, 3")]


def test_factors_are_told_as_the_axis_that_they_make():
    made_of = {"tp": ("kvg", "kvr")}
    mesh = read_mesh("dp=2, kvg=2, kvr=2")
    whole = picture_of(bind(parse_spec("[kvg*kvr, -]"), (8, 2), mesh), made_of=made_of)
    assert [whole.place_text(index) for index in range(4)] == ["tp 0", "tp 1", "tp 2", "tp 3"]
    part = picture_of(bind(parse_spec("[kvg, -]"), (8, 2), mesh), made_of=made_of)
    assert [part.place_text(index) for index in range(2)] == ["kvg 0", "kvg 1"]
