"""Routes between any two layouts: every rank gets what it lacks, exactly once, from one that has it."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.box import Box
from shardtensor.layout.layout import Layout
from shardtensor.layout.route import Region, route, transfer
from shardtensor.mesh import Mesh
from shardtensor.spec.parse import parse_spec

MESHES = (Mesh((("x", 1),)), Mesh((("x", 3),)), Mesh((("x", 4),)), Mesh((("x", 2), ("y", 2))))
SPECS = (
    *("replicate", "[x balanced, -]", "[-, x balanced]", "[x sizes(3, 0, 2), -]", "[x pad(3), -]", "flat(x)"),
    *("[x*y balanced, -]", "[y*x balanced, -]", "[x balanced, y balanced]", "[y balanced, x balanced]"),
    *("[-, x balanced] flat(y)", "[-, y balanced]", "[x blocks(2) balanced, -]", "flat(x*y, unit=row)"),
    *("[x balanced, -] flat(y)", 'grid(splits=(2, 2), placements=["rank:0-3/cpu"])'),
    'chunk(dim=0, placements=["rank:0-1/cpu"])',
    'chunk(dim=1, placements=["rank:2/cpu", "rank:0/cpu", "rank:1/cpu"])',
    'chunk(dim=0, placements=["rank:0/cpu", "rank:1/cpu", "rank:0/cpu"])',
)
SHAPES = ((5, 6), (6, 4), (1, 3), (0, 4), (2, 2))


def layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    found = []
    for text in SPECS:
        try:
            found.append(bind(parse_spec(text), shape, mesh))
        except LayoutError:
            continue
    return found


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))))


def held(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    return set().union(*(cells(box) for box in layout.boxes(rank)))


def order(layout: Layout, rank: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """From each place of a rank's local tensor to the element of the tensor that it holds."""
    places = {}
    for box, local in zip(layout.boxes(rank), layout.local_boxes(rank), strict=True):
        there = sorted(cells(box))
        here = sorted(cells(local))
        places.update(zip(here, there, strict=True))
    return places


def looked_at(region: Region, places: dict[tuple[int, ...], tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The elements that a region of a local tensor holds, row-major."""
    inside = [p for p in sorted(places) if all(s.start <= i < s.stop for i, s in zip(p, region.held, strict=True))]
    found = [places[p] for p in inside]
    if region.shape is None:
        return found
    grid = list(product(*(range(n) for n in region.shape)))
    return [
        element
        for at, element in zip(grid, found, strict=True)
        if all(s.start <= i < s.stop for i, s in zip(at, region.within, strict=True))
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_receives_exactly_what_it_lacks(mesh: Mesh, shape: tuple[int, ...]) -> None:
    for source, target in product(layouts(mesh, shape), repeat=2):
        steps = route(source, target)
        assert len(steps) <= 1, "nothing has to be joined"
        if not steps:
            assert all(source.boxes(rank) == target.boxes(rank) for rank in mesh.ranks)
            continue
        (step,) = steps
        for rank in mesh.ranks:
            before, after = held(source, rank), held(target, rank)
            assert step.received(rank) == len(after - before)
            if step.kind == "slice":
                assert after <= before
        assert step.kind == "slice" or not source.is_replicated, "who holds all receives nothing"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pieces_meet(mesh: Mesh) -> None:
    """What one rank sends another, element by element, is what the other expects there."""
    shape = (5, 6)
    for source, target in product(layouts(mesh, shape), repeat=2):
        for step in route(source, target):
            for rank in mesh.ranks:
                members = mesh.ranks if step.axes is None else step.members(rank)
                moves, new = transfer(source, target, rank, members), order(target, rank)
                received = sum(region.numel for regions in moves.receives for region in regions)
                assert received == step.received(rank)
                arrived: list[tuple[int, ...]] = []
                for here, there in moves.keeps:
                    goes = looked_at(there, new)
                    assert looked_at(here, order(source, rank)) == goes
                    arrived += goes
                for place, peer in enumerate(members):
                    if peer == rank:
                        continue
                    sent = transfer(source, target, peer, members).sends[list(members).index(rank)]
                    goes = [e for region in moves.receives[place] for e in looked_at(region, new)]
                    assert [e for region in sent for e in looked_at(region, order(source, peer))] == goes
                    arrived += goes
                assert sorted(arrived) == sorted(new.values())


@examples(60)
@given(st.data())
def test_partials_are_joined_once_and_made_last(data: st.DataObject) -> None:
    mesh = Mesh((("x", 2), ("y", 2)))
    texts = [
        *("replicate partial(x)", "[-, y] partial(x)", "[x, -] partial(y)", "replicate partial(x*y)"),
        *("[y, -] partial(x, op=max)", "replicate", "[x, y]", "[x*y, -]", "replicate partial(y, op=avg)"),
    ]
    source, target = (bind(parse_spec(data.draw(st.sampled_from(texts))), (4, 4), mesh) for _ in range(2))
    steps = route(source, target)
    assert not steps or (steps[0].source == source and steps[-1].target == target)
    assert all(one.target == other.source for one, other in pairwise(steps))
    joined = [p for step in steps for p in step.source.partial if p not in step.target.partial]
    made = [p for step in steps for p in step.target.partial if p not in step.source.partial]
    assert sorted(joined) == sorted(p for p in source.partial if p not in target.partial)
    assert sorted(made) == sorted(p for p in target.partial if p not in source.partial)
    joining = [step for step in steps if len(step.source.partial) > len(step.target.partial)]
    assert all(step.kind in ("reduce_scatter", "all_reduce") for step in joining)


def test_partials_that_are_cut_next_are_scattered() -> None:
    mesh = Mesh((("x", 2), ("y", 2)))

    def kinds(source: str, target: str) -> list[str]:
        return [s.kind for s in route(*(bind(parse_spec(text), (4, 4), mesh) for text in (source, target)))]

    assert kinds("replicate partial(x)", "[x, -]") == ["reduce_scatter"]
    assert kinds("replicate partial(x)", "[y, -]") == ["all_reduce", "slice"]
    assert kinds("[-, y] partial(x)", "[x, y]") == ["reduce_scatter"]
    assert kinds("replicate partial(x*y)", "[x, -] partial(y)") == ["reduce_scatter"]
    assert kinds("replicate partial(x, op=max)", "[x, -]") == ["all_reduce", "slice"]
    assert kinds("[x, -]", "replicate partial(x)") == ["all_gather", "split"]
    assert kinds("[x, -] flat(y)", "[x, -]") == ["all_to_all"]


def test_only_the_ranks_along_axes_that_differ_take_part() -> None:
    mesh = Mesh((("x", 2), ("y", 4)))
    source, target = (bind(parse_spec(text), (8, 8), mesh) for text in ("[x, y]", "[x, -]"))
    (step,) = route(source, target)
    assert (step.kind, step.axes, step.where, list(step.members(5))) == ("all_gather", (1,), "y=4", [4, 5, 6, 7])


def test_axes_of_a_step_are_in_the_order_of_the_mesh() -> None:
    """Equal groups of ranks are one group, whatever order a text names their axes in."""
    mesh = Mesh((("x", 2), ("y", 2)))
    for text in ("replicate partial(x*y)", "replicate partial(y*x)", "replicate partial(y) partial(x)"):
        source, target = (bind(parse_spec(spec), (4, 4), mesh) for spec in (text, "replicate"))
        (step,) = route(source, target)
        assert step.axes == (0, 1)


def test_ranks_outside_are_dealt_to_the_copies() -> None:
    """Each of those who hold the same gives to as many: no copy serves all."""
    shape, takers = (8, 4), range(4, 8)
    target = bind(parse_spec("[x, -]"), shape, Mesh((("x", 4),), takers))
    for holders in (Mesh((("x", 2),)), Mesh((("x", 4),)), Mesh((("x", 2), ("y", 2)))):
        for text in ("replicate", "[-, x]", "[x, -]"):
            source = bind(parse_spec(text), shape, holders)
            received = {rank: transfer(source, target, rank, range(8)).receives for rank in takers}
            givers = [giver for rank in takers for giver in range(8) for _ in received[rank][giver]]
            assert {givers.count(giver) for giver in holders.ranks} == {len(givers) // holders.size}, (text, givers)
            for rank in takers:
                places = order(target, rank)
                cells_got = [cell for regions in received[rank] for each in regions for cell in looked_at(each, places)]
                assert sorted(cells_got) == sorted(held(target, rank))


def test_what_a_rank_receives_of_partials() -> None:
    mesh = Mesh((("x", 4), ("y", 2)))

    def received(source: str, target: str) -> list[tuple[str, int]]:
        steps = route(*(bind(parse_spec(text), (8, 8), mesh) for text in (source, target)))
        return [(step.kind, step.received(3)) for step in steps]

    assert received("replicate partial(x)", "[x, -]") == [("reduce_scatter", 3 * 16)]
    assert received("replicate partial(x)", "replicate") == [("all_reduce", 2 * 3 * 64 // 4)]
    assert received("[-, y] partial(x)", "[x, y]") == [("reduce_scatter", 3 * 8)]
    assert received("replicate", "replicate partial(x)") == [("split", 0)]


def test_another_shape_is_refused() -> None:
    mesh = Mesh((("x", 2),))
    with pytest.raises(LayoutError) as error:
        route(bind(parse_spec("[x, -]"), (2, 4), mesh), bind(parse_spec("[x, -]"), (4, 2), mesh))
    assert str(error.value).splitlines()[0] == "a reshard keeps the shape of a tensor"


def test_a_step_without_axes_is_of_all_ranks_that_hold_a_part():
    mesh = Mesh((("x", 4),))
    there, here = (
        parse_spec(f'chunk(dim=0, placements=["rank:{a}/cpu", "rank:{b}/cpu"])') for a, b in ((3, 1), (1, 2))
    )
    steps = route(bind(there, (4, 4), mesh), bind(here, (4, 4), mesh))
    assert [step.axes for step in steps] == [None] * len(steps) and steps
    for step in steps:
        assert list(step.members(1)) == [1, 2, 3] and step.group_size == 3 and step.where == "3 ranks"
