"""The ways to lay out a call that are weighed are all that there are, and the cheapest of them is taken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

from harness import FULL
from rules.fixed_rules import parse_rule
from test_propagate import MESH, RULES, SIZES, every_choice, reduced

from shardtensor.layout.bind import bind
from shardtensor.layout.layout import DimCut, Layout, MeshLayout, replicated
from shardtensor.layout.pieces import chunked, listed
from shardtensor.mesh import Mesh
from shardtensor.rules.propagate import MOST, assignments, base_of, cost, propagate, received, sharding_of
from shardtensor.rules.rule import Rule
from shardtensor.spec.parse import parse_spec

Operand = Layout | tuple[int, ...]
MORE = ["!b n, n k -> k", "b !n k -> b k", "b !n, n k -> b k", "b n !k, n -> b n", "1 b, k b -> k b", "b i, i b -> b i"]


def ways_to_lay_out(shape: tuple[int, ...]) -> list[Operand]:
    """A plain operand, a copy, and cuts of one dim or of two."""
    found: list[Operand] = [shape, replicated(shape, MESH.ranks, MESH.sizes)]
    cuts = [
        [DimCut((0,), chunked(n, 2)), DimCut((1,), chunked(n, 3)), DimCut((1, 0), chunked(n, 6)),
         DimCut((1,), listed((n, 0, 0)))]
        for n in shape
    ]  # fmt: skip
    kinds = [{dim: cut} for dim, some in enumerate(cuts) for cut in some]
    kinds += [{a: cuts[a][0], b: cuts[b][1]} for a, b in product(range(len(shape)), repeat=2) if a != b]
    for kind in kinds:
        dims = tuple(kind.get(dim) for dim in range(len(shape)))
        found.append(MeshLayout(shape=shape, ranks=MESH.ranks, grid=MESH.sizes, names=MESH.names, dims=dims))
    return found


def calls() -> Iterator[tuple[Rule, tuple[Operand, ...]]]:
    for text in RULES + MORE:
        rule = parse_rule(text)
        shapes = [tuple(1 if letter is None else SIZES[letter] for letter in letters) for letters in rule.inputs]
        every = product(*map(ways_to_lay_out, shapes))
        for operands in islice(every, 0, None, 1 if FULL or len(shapes) < 3 else 37):
            if any(isinstance(operand, Layout) for operand in operands):
                yield rule, operands


def test_every_way_is_weighed_and_the_cheapest_is_taken():
    for rule, operands in calls():
        base = base_of([operand for operand in operands if isinstance(operand, Layout)])
        weighed = assignments(rule, operands, base)
        assert len(weighed) < MOST
        ways = {frozenset(way.items()) for way in weighed}
        assert len(ways) == len(weighed)
        assert ways == {frozenset(way.items()) for way in every_choice(rule, operands)}, (str(rule), operands)
        for itemsizes in ((4,) * len(operands), (8, 2, 1)[: len(operands)]):
            spent = [cost(rule, operands, way, base, itemsizes) for way in weighed]
            for way, bytes_ in zip(weighed, spent, strict=True):
                sharding = sharding_of(rule, operands, way, base)
                moved = sum(
                    itemsize * received(operand, need.layout)
                    for operand, need, itemsize in zip(operands, sharding.needs, itemsizes, strict=True)
                    if isinstance(operand, Layout)
                )
                assert moved + reduced(sharding, itemsizes) == bytes_, (str(rule), operands)
            first = weighed[spent.index(min(spent))]
            assert propagate(rule, operands, itemsizes) == sharding_of(rule, operands, first, base)


def test_the_grid_is_that_of_the_most_ranks_then_of_what_is_cut_then_of_the_largest():
    small, large = ((n, 4) for n in (3, 5))
    kinds = [ways_to_lay_out(shape)[1:3] for shape in (small, large)]
    (small_copy, small_rows), (large_copy, large_rows) = kinds
    flat = bind(parse_spec("flat(dp)"), large, MESH)
    few = MeshLayout(shape=large, ranks=(0, 1), grid=(2,), dims=(DimCut((0,), chunked(5, 2)), None))
    in_order = [large_rows, small_rows, flat, large_copy, small_copy, few]
    for k, first in enumerate(in_order):
        assert base_of(in_order[k:]) is first and base_of(in_order[k:][::-1]) is first


def test_an_operand_on_another_grid_may_lie_anywhere_if_no_other_is_cut():
    rule = parse_rule("b k, k -> b k")
    whole = replicated((5, 4), MESH.ranks, MESH.sizes)
    off = MeshLayout(shape=(5, 4), ranks=(0, 1), grid=(2,), dims=(DimCut((0,), chunked(5, 2)), None))
    for operands in ((off, (4,)), (off, replicated((4,), MESH.ranks, MESH.sizes))):
        base = base_of([x for x in operands if isinstance(x, Layout)])
        ways = assignments(rule, operands, base)
        assert ways
        axes = {axis for way in ways for cut in way.values() for axis in cut.axes}
        assert axes == set(range(len(base.grid)))
    assert base_of([off, whole]) is whole


def test_the_first_way_keeps_the_cuts_of_the_largest_operand():
    """So that equal costs, and calls with more ways than are compared, leave the largest operand where it is."""
    mesh = Mesh((("tp", 2),))
    rule = Rule((("i", "k"), ("k", "j")), ("i", "j"))
    for small, large in ((4, 8), (8, 4)):
        left, right = bind(parse_spec("[tp, -]"), (small, 4), mesh), bind(parse_spec("[-, tp]"), (4, large), mesh)
        first, *_ = assignments(rule, (left, right), base_of([left, right]))
        assert list(first) == (["j"] if large > small else ["i"])
