"""Pictures of layouts: parts cover every element once, and hold what their ranks hold."""

from __future__ import annotations

import math
from itertools import product

import pytest

from shardtensor.cli.show_text import Scene
from shardtensor.layout.bind import bind
from shardtensor.layout.picture import map_cells, picture_of
from shardtensor.mesh import read_mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Resolved
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
@pytest.mark.parametrize("limit", [1, 2, 5, 64])
def test_parts_cover_each_element_once_and_ranks_find_theirs(text, shape, mesh, limit):
    layout = layout_of(text, shape, mesh)
    picture = picture_of(layout, limit)
    drawn = cells([box for part in picture.parts for box in part.boxes])
    assert sorted(drawn) == list(product(*map(range, shape)))
    holders = {rank: i for i, part in enumerate(picture.parts) for rank in picture.ranks(part, 10**6)[0]}
    for rank in layout.ranks:
        part = picture.parts[holders[rank]]
        assert set(cells(layout.boxes(rank))) <= set(cells(part.boxes))
        assert part.least <= layout.numel(rank) <= part.most
        if part.places == 1:
            assert cells(part.boxes) == cells(layout.boxes(rank))
    for part in picture.parts:
        ranks, count = picture.ranks(part, 10**6)
        assert len(ranks) == count
        assert part.rank in ranks
    assert set(holders) == set(layout.ranks)


MAPS = [
    (text, shape, mesh, split)
    for text, shape, mesh in (*CASES, ("flat(dp)", (2, 2, 5), "dp=3"))
    for split in range(1 if len(shape) > 1 else 0, max(len(shape), 1))
    if all(shape) and math.prod(shape[split:]) <= 16 and not text.startswith("replicate")
]


@pytest.mark.parametrize(("text", "shape", "mesh", "split"), MAPS)
def test_each_cell_of_a_map_shows_who_holds_it(text, shape, mesh, split):
    parts = picture_of(layout_of(text, shape, mesh)).parts
    holders = {at: i for i, part in enumerate(parts) for at in cells(part.boxes)}
    places = [holders[at] for at in product(*map(range, shape))]
    width = math.prod(shape[split:])
    rows = [places[i : i + width] for i in range(0, len(places), width)]
    lines = map_cells(shape, [part.boxes for part in parts], split=split, lines=1000)
    assert lines == rows or (len(lines) == 1 and all(row == lines[0] for row in rows))


def test_a_large_world_takes_a_few_parts():
    layout = layout_of("[tp*dp, -] ", (1 << 20, 8), "dp=2048, tp=8")
    picture = picture_of(layout, 64)
    assert len(picture.parts) == 64
    assert {part.places for part in picture.parts} == {256}
    assert picture.place_text(picture.parts[1]) == "tp 0, dp 256 to 511"
    assert picture.ranks(picture.parts[1], 2) == ((2048, 2056), 256)


def test_factors_are_told_as_the_axis_that_they_make():
    made_of = {"tp": ("kvg", "kvr")}
    mesh = read_mesh("dp=2, kvg=2, kvr=2")
    whole = picture_of(bind(parse_spec("[kvg*kvr, -]"), (8, 2), mesh), made_of=made_of)
    assert [whole.place_text(part) for part in whole.parts] == ["tp 0", "tp 1", "tp 2", "tp 3"]
    part = picture_of(bind(parse_spec("[kvg, -]"), (8, 2), mesh), made_of=made_of)
    assert [part.place_text(each) for each in part.parts] == ["kvg 0", "kvg 1"]
    of_mesh = Scene("", "", Resolved(Plan(Axes(mesh, made_of)), Model(()), {}, {}), ())
    assert of_mesh.mesh_text == "8 ranks = dp 2 × tp 4 (kvg 2 × kvr 2)"
