"""Layouts said axis by axis: the elements that chunking again and again leaves, and the way back."""

from __future__ import annotations

from itertools import product

import pytest

from shardtensor.layout.bind import bind
from shardtensor.layout.nested import CutDim, Partials, nearest_nested, nested_axes, nested_layout
from shardtensor.mesh import Mesh
from shardtensor.spec.parse import parse_spec

GRIDS = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2), (4, 2), (2, 1, 3), (2, 2, 2)]
LENGTHS = (0, 1, 2, 3, 5, 7, 8, 11, 12)


def grid_of(sizes: tuple[int, ...]) -> Mesh:
    return Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))


def chunk(items: list[int], count: int) -> list[list[int]]:
    step = -(-len(items) // count)
    return [items[i * step : (i + 1) * step] for i in range(count)]


def cut_by_hand(length: int, said, sizes: tuple[int, ...], place: tuple[int, ...]) -> list[int]:
    """The elements at a place, by cutting a list of them as each axis says."""
    items = list(range(length))
    for what, size, index in zip(said, sizes, place, strict=True):
        if what is not None:
            items = [i for stretch in chunk(items, what.blocks) for i in chunk(stretch, size)[index]]
    return items


def elements(layout, rank: int) -> list[int]:
    return [i for box in layout.boxes(rank) for i in range(box.offsets[0], box.ends[0])]


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_every_axis_cuts_what_is_left(sizes):
    mesh = grid_of(sizes)
    choices = [None, *(CutDim(0, blocks) for blocks in (1, 2, 3)[: 4 - len(sizes)])]
    for said, length in product(product(choices, repeat=len(sizes)), LENGTHS):
        layout = nested_layout(said, (length,), mesh)
        for rank in mesh.ranks:
            expected = cut_by_hand(length, said, sizes, mesh.coordinate(rank))
            assert elements(layout, rank) == expected, (said, length, rank)
            assert layout.local_shape(rank) == (len(expected),)


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_what_is_said_can_be_said_again(sizes):
    mesh = grid_of(sizes)
    choices = [None, *(CutDim(0, blocks) for blocks in (1, 2, 3)[: 4 - len(sizes)])]
    for said, length in product(product(choices, repeat=len(sizes)), LENGTHS):
        layout = nested_layout(said, (length,), mesh)
        again = nested_axes(layout, mesh)
        assert again is not None, (said, length)
        assert [what is None for what in again] == [what is None for what in said]
        back = nested_layout(again, (length,), mesh)
        assert [elements(back, rank) for rank in mesh.ranks] == [elements(layout, rank) for rank in mesh.ranks]


@pytest.mark.parametrize(
    ("text", "shape", "said"),
    [
        ("[dp, tp]", (4, 6), (CutDim(0), CutDim(1))),
        ("[tp, dp]", (6, 4), (CutDim(1), CutDim(0))),
        ("[dp*tp, -]", (12, 2), (CutDim(0), CutDim(0))),
        ("[tp*dp, -]", (12, 2), (CutDim(0, 3), CutDim(0))),
        ("[-, tp blocks(2)]", (2, 12), (None, CutDim(1, 2))),
        ("[dp, -] partial(tp, op=max)", (4, 6), (CutDim(0), Partials("max"))),
        ("replicate", (4, 6), (None, None)),
        ("[dp sizes(3, 2), -]", (5, 2), (CutDim(0), None)),
        ("[dp balanced, -]", (5, 2), (CutDim(0), None)),
        ("[tp balanced, -]", (4, 2), None),
        ("[dp sizes(2, 3), -]", (5, 2), None),
        ("[-, -] flat(tp)", (4, 3), None),
        ("[-] flat(dp*tp)", (12,), (CutDim(0), CutDim(0))),
        ("[-, -] flat(dp, unit=row)", (4, 3), (CutDim(0), None)),
    ],
)
def test_which_specs_can_be_said(text, shape, said):
    mesh = Mesh((("dp", 2), ("tp", 3)))
    assert nested_axes(bind(parse_spec(text), shape, mesh), mesh) == said


def test_device_forms_fit_any_mesh_of_their_ranks():
    chunks = bind(parse_spec('chunk(dim=0, placements=["rank:0-3/cpu"])'), (7, 2), Mesh((("*", 4),)))
    assert nested_axes(chunks, Mesh((("x", 4),))) == (CutDim(0),)
    assert nested_axes(chunks, Mesh((("x", 2), ("y", 2)))) == (CutDim(0), CutDim(0))  # 4, 3 and then 2, 2, 2, 1
    grid = bind(parse_spec('grid(splits=(2, 2), placements=["rank:0-3/cpu"])'), (4, 4), Mesh((("*", 4),)))
    assert nested_axes(grid, Mesh((("x", 2), ("y", 2)))) == (CutDim(0), CutDim(1))
    assert nested_axes(grid, Mesh((("x", 4),))) is None
    rows = bind(parse_spec('chunk(dim=1, placements=["rank:1/cpu", "rank:0/cpu"])'), (2, 4), Mesh((("*", 2),)))
    assert nested_axes(rows, Mesh((("x", 2),))) is None  # of other ranks in that order


def test_axes_are_split_and_joined():
    fine, coarse = Mesh((("a", 2), ("b", 1), ("c", 3))), Mesh((("x", 6),))
    said = nested_layout((CutDim(0), None, CutDim(0)), (12,), fine)
    assert nested_axes(said, coarse) == (CutDim(0),)
    assert nested_axes(nested_layout((CutDim(0),), (12,), coarse), fine) == (CutDim(0), None, CutDim(0))
    assert nested_axes(nested_layout((CutDim(0), None, None), (12,), fine), coarse) is None
    assert nested_axes(nested_layout((Partials("sum"), None, CutDim(0)), (12,), fine), coarse) is None
    summed = nested_layout((Partials("sum"),), (12,), coarse)
    assert nested_axes(summed, fine) == (Partials("sum"), None, Partials("sum"))
    grid = nested_layout((CutDim(0), CutDim(1)), (4, 6), Mesh((("a", 2), ("b", 3))))
    assert nested_axes(grid, Mesh((("a", 3), ("b", 2)))) is None


def test_the_nearest_keeps_the_axes():
    mesh = Mesh((("dp", 2), ("tp", 3)))
    odd = bind(parse_spec("[tp sizes(0, 4, 1), dp]"), (5, 4), mesh)
    assert str(nearest_nested(odd, mesh)) == "[tp, dp]"
    assert [nearest_nested(odd, mesh).local_shape(rank)[0] for rank in range(3)] == [2, 2, 1]
    assert str(nearest_nested(bind(parse_spec("[-, -] flat(tp)"), (5, 4), mesh), mesh)) == "[dp*tp, -]"


def test_where_a_rank_without_elements_starts_means_nothing():
    mesh = grid_of((2,))
    layout = bind(parse_spec('enum([0:1] @ "rank:0/cpu", [0:0] @ "rank:1/cpu")'), (1,), mesh)
    assert nested_axes(layout, mesh) == (CutDim(0),)
