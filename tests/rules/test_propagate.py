"""Local computations add up to the dense one, forward and backward; checked rank by rank on integers."""

from __future__ import annotations

import math
from itertools import product as every_combination

import pytest
import torch
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from rules.fixed_rules import parse_rule

from shardtensor.layout.bind import bind
from shardtensor.layout.layout import DimCut, Layout, ListedLayout, MeshLayout
from shardtensor.layout.pieces import chunked
from shardtensor.mesh import Mesh
from shardtensor.rules.propagate import EVERY, OpSharding, propagate, received
from shardtensor.rules.propagate import sharding_of as recipe_for
from shardtensor.rules.rule import Rule
from shardtensor.rules.table import ROWS
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Cut, Replicate, Spec

MESH = Mesh((("dp", 2), ("tp", 3)))
SIZES = {"b": 5, "k": 4, "n": 3, "i": 2, "j": 7}
RULES = [
    "b k, n k -> b n",  # linear
    "b k, k n -> b n",
    "i b k, n k -> i b n",
    "b i k, b k j -> b i j",
    "b k, b k -> b k",
    "b k, k -> b k",
    "b, k -> b k",
    "b k, b k -> ()",
    "b k -> b",
    "!b k, k -> !b k",
    "b k, n k, n -> b",
    "b !k -> b !k",
    "!b n, !b k, k -> n k",
]


def part(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The local tensor of a rank, dims cut in blocks included."""
    local = full.new_empty(layout.local_shape(rank))
    for here, there in zip(layout.local_boxes(rank), layout.boxes(rank), strict=True):
        local[here.slices] = full[there.slices]
    return local


def product(rule: Rule, operands: list[torch.Tensor]) -> torch.Tensor:
    """The sum of products that a rule says; dims without a letter are of size one."""
    letters = dict.fromkeys(letter for side in rule.inputs for letter in side if letter)
    names = {letter: chr(97 + i) for i, letter in enumerate(letters)}
    kept = [
        operand.reshape([n for n, letter in zip(operand.shape, side, strict=True) if letter])
        for operand, side in zip(operands, rule.inputs, strict=True)
    ]
    left = ",".join("".join(names[x] for x in side if x) for side in rule.inputs)
    return torch.einsum(f"{left}->{''.join(names[x] for x in rule.output)}", kept)


def check(rule: Rule, operands: tuple[Layout | tuple[int, ...], ...]) -> None:
    sharding = propagate(rule, operands)
    assert sharding is not None
    _check_letters(rule, [need.layout for need in sharding.needs] + [sharding.output])
    generator = torch.Generator().manual_seed(0)
    shapes = [x.shape if isinstance(x, Layout) else x for x in operands]
    dense = [torch.randint(-4, 5, shape, generator=generator).double().requires_grad_() for shape in shapes]
    expected = product(rule, dense)
    weight = torch.randint(-4, 5, expected.shape, generator=generator).double()
    (expected * weight).sum().backward()
    locals_, results = {}, {}
    for rank in MESH.ranks:
        for x, need in zip(operands, sharding.needs, strict=True):
            assert need.moves == (isinstance(x, Layout) and x != need.layout and not x.is_replicated)
        locals_[rank] = [
            part(x.detach(), need.layout, rank).requires_grad_() for x, need in zip(dense, sharding.needs, strict=True)
        ]
        results[rank] = product(rule, locals_[rank])
        assert tuple(results[rank].shape) == sharding.output.local_shape(rank)
        if results[rank].requires_grad:
            results[rank].backward(part(weight, sharding.reduced, rank))
    summed = [axis for axis, _ in sharding.output.partial]
    assert sharding.output.reduced() == sharding.reduced
    for rank in MESH.ranks:
        total = sum(results[other].detach() for other in MESH.ranks_along(rank, summed))
        assert torch.equal(total, part(expected.detach(), sharding.reduced, rank))
        for i, need in enumerate(sharding.needs):
            grads = [locals_[other][i].grad for other in MESH.ranks_along(rank, need.grad_partial_axes)]
            assert torch.equal(sum(grads), part(dense[i].grad, need.layout, rank))


def _check_letters(rule: Rule, layouts: list[MeshLayout]) -> None:
    """A letter is cut alike wherever it stands, a whole one nowhere, and no axis cuts two letters."""
    cuts = {}
    for letters, layout in zip([*rule.inputs, rule.output], layouts, strict=True):
        for letter, cut in zip(letters, layout.dims, strict=True):
            if letter is None:
                assert cut is None
            else:
                assert cuts.setdefault(letter, cut) == cut
    assert all(cuts[letter] is None for letter in rule.whole)
    axes = [axis for cut in cuts.values() if cut is not None for axis in cut.axes]
    assert len(axes) == len(set(axes))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout | tuple[int, ...]:
    """A plain operand, or one of each way to cut dims over the axes of the mesh."""
    free = draw(st.permutations([("dp",), ("tp",)])) if draw(st.booleans()) else [("tp", "dp")]
    dims: list[Cut | None] = [None] * len(shape)
    for dim in draw(st.permutations(range(len(shape)))):
        if not free or draw(st.booleans()):
            continue
        axes = free.pop()
        count = math.prod(dict(MESH.axes)[axis] for axis in axes)
        if draw(st.booleans()):
            cuts = sorted(draw(st.integers(0, shape[dim])) for _ in range(count - 1))
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, shape[dim]], strict=True)]
            dims[dim] = Cut(axes, sizes=tuple(sizes))
        else:
            dims[dim] = Cut(axes, balanced=True)
    if not any(dims) and draw(st.booleans()):
        return shape
    return bind(Spec(*dims) if dims else Replicate(), shape, MESH)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Rule, tuple[Layout | tuple[int, ...], ...]]:
    if draw(st.booleans()):
        rule = parse_rule(draw(st.sampled_from(RULES)))
        shapes = [tuple(SIZES[letter] for letter in letters) for letters in rule.inputs]
    else:
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
        shapes = [shape, tuple(n if draw(st.booleans()) else 1 for n in shape[draw(st.integers(0, len(shape) - 1)) :])]
        rule = ROWS["add"].rule(tuple(shapes))
    operands = tuple(draw(layouts(shape)) for shape in shapes)
    if not any(isinstance(operand, Layout) for operand in operands):
        operands = (bind(Replicate(), shapes[0], MESH), *operands[1:])
    return rule, operands


@examples(300)
@given(calls())
def test_local_results_add_up_to_the_dense_one(call):
    check(*call)


# -- what is chosen --------------------------------------------------------------------------------------------------


def cut(shape: tuple[int, ...], *dims: str | tuple[str, ...] | None) -> Layout:
    return bind(Spec(*(None if dim is None else Cut(dim, balanced=True) for dim in dims)), shape, MESH)


def sharding_of(rule: str, *operands: Layout | tuple[int, ...]):
    sharding = propagate(parse_rule(rule), operands)
    assert sharding is not None
    check(parse_rule(rule), operands)
    return sharding


def test_a_column_parallel_linear_moves_nothing():
    sharding = sharding_of("b k, n k -> b n", (5, 4), cut((6, 4), "tp", None))
    assert [need.moves for need in sharding.needs] == [False, False]
    assert [need.grad_partial_axes for need in sharding.needs] == [(1,), ()]
    assert sharding.output == cut((5, 6), None, "tp")


def test_a_row_parallel_linear_leaves_a_sum():
    sharding = sharding_of("b k, n k -> b n", cut((5, 6), None, "tp"), cut((4, 6), None, "tp"))
    assert not any(need.moves for need in sharding.needs)
    assert sharding.output.partial == ((1, "sum"),)
    assert sharding.reduced.is_replicated


def test_an_axis_on_two_letters_stays_with_the_larger_operand():
    large, small = cut((9, 6), "tp", None), cut((4, 6), None, "tp")
    sharding = sharding_of("b k, n k -> b n", large, small)
    assert [need.moves for need in sharding.needs] == [False, True]
    assert sharding.needs[1].layout.cut_dims == ()
    assert sharding.output == cut((9, 4), "tp", None)
    sharding = sharding_of("b k, n k -> b n", cut((2, 6), "tp", None), cut((4, 6), None, "tp"))
    assert [need.moves for need in sharding.needs] == [True, False]
    assert sharding.output.partial == ((1, "sum"),)


def test_one_letter_cut_in_two_ways_follows_the_larger_operand():
    sharding = sharding_of("b k, k n -> b n", cut((5, 6), None, "tp"), cut((6, 4), "dp", None))
    assert [need.moves for need in sharding.needs] == [False, True]
    assert sharding.needs[1].layout == cut((6, 4), "tp", None)


def test_two_axes_on_two_letters_both_stay():
    sharding = sharding_of("b k, n k -> b n", cut((5, 4), "dp", None), cut((6, 4), "tp", None))
    assert not any(need.moves for need in sharding.needs)
    assert sharding.output == cut((5, 6), "dp", "tp")
    assert [need.grad_partial_axes for need in sharding.needs] == [(1,), (0,)]


def test_a_whole_letter_hands_its_axis_to_one_that_stays():
    sharding = sharding_of("b !k -> b !k", cut((12, 6), None, "tp"))
    assert sharding.output == cut((12, 6), "tp", None)
    sharding = sharding_of("b !k -> b !k", cut((12, 6), "dp", "tp"))
    assert sharding.output == cut((12, 6), ("dp", "tp"), None)


def test_a_whole_letter_is_gathered_where_no_other_is_free():
    sharding = sharding_of("!k -> !k", cut((6,), "tp"))
    assert sharding.needs[0].moves
    assert sharding.output.is_replicated
    sharding = sharding_of("b !k -> ", cut((6, 6), None, "tp"))
    assert sharding.output.is_replicated, "a reduction where there was none"


def test_the_cheaper_operand_moves():
    rule = "b k, n k -> b n"
    sharding = sharding_of(rule, cut((3, 4), "tp", None), cut((9, 4), "tp", None))
    assert [need.moves for need in sharding.needs] == [True, False]
    sharding = sharding_of(rule, cut((9, 4), "tp", None), cut((3, 4), "tp", None))
    assert [need.moves for need in sharding.needs] == [False, True]
    small, large = cut((9, 4), "tp", None), cut((9, 4), "tp", None)
    assert propagate(parse_rule(rule), (small, large), (1, 8)).needs[0].moves
    assert propagate(parse_rule(rule), (small, large), (8, 1)).needs[1].moves


def test_what_operands_agree_on_stays_whatever_the_reduction_costs():
    sharding = sharding_of("b k, n k -> b n", cut((50, 3), None, "tp"), (40, 3))
    assert not any(need.moves for need in sharding.needs)
    assert sharding.output.partial == ((1, "sum"),)


def test_a_row_parallel_linear_meets_rows_by_the_cheaper_way():
    rule = "b k, n k -> b n"
    sharding = sharding_of(rule, cut((30, 6), None, "tp"), cut((6, 6), "tp", None))
    assert sharding.output == cut((30, 6), None, "tp"), "k cut would leave a sum of 30 x 6 to reduce"
    sharding = sharding_of(rule, cut((1, 60), None, "tp"), cut((6, 60), "tp", None))
    assert sharding.output == cut((1, 6), None, "tp"), "to gather one row is less than to lay out six anew"
    sharding = sharding_of(rule, cut((2, 900), None, "tp"), cut((3, 900), "tp", None))
    assert sharding.output.partial == ((1, "sum"),), "six sums are less than a gathered input"


def test_a_dim_that_broadcasts_is_a_copy():
    rule = ROWS["add"].rule(((5, 6), (5, 1)))
    operands = (cut((5, 6), None, "tp"), (5, 1))
    check(rule, operands)
    assert propagate(rule, operands).needs[1].grad_partial_axes == (1,)


def test_operands_on_another_grid_move():
    other = bind(ChunkShardingSpec(0, ["rank:0-1/cpu"]), (5, 4), MESH)
    sharding = propagate(parse_rule("b k, b k -> b k"), (cut((5, 4), "tp", None), other))
    assert [need.moves for need in sharding.needs] == [False, True]
    assert sharding.needs[1].layout == sharding.needs[0].layout


def test_boxes_written_out_come_to_a_grid():
    boxes = [ShardMetadata([i * 2, 0], [2, 4], f"rank:{i % 2}/cpu") for i in range(3)]
    listed = bind(EnumerableShardingSpec(boxes), (6, 4), MESH)
    flat = bind(Replicate().flat("dp"), (6, 4), MESH)
    rule = parse_rule("b k, b k -> b k")
    check(rule, (listed, flat))
    check(rule, (flat, (6, 4)))
    assert propagate(rule, (flat, (6, 4))).output == cut((6, 4), "dp", None)
    sharding = propagate(rule, (listed, cut((6, 4), "tp", None)))
    assert [need.moves for need in sharding.needs] == [True, False]
    assert propagate(rule, ((6, 4), (6, 4))) is None


def test_a_copy_on_more_ranks_brings_an_operand_of_fewer_to_them():
    few = bind(ChunkShardingSpec(0, ["rank:0-1/cpu"]), (6, 4), MESH)
    sharding = propagate(parse_rule("b k, b k -> b k"), (few, bind(Replicate(), (6, 4), MESH)))
    assert sharding.output == cut((6, 4), ("dp", "tp"), None)


# -- it is the cheapest ----------------------------------------------------------------------------------------------


def elements(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    return {
        index
        for box in layout.boxes(rank)
        for index in every_combination(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
    }


def moved(sharding: OpSharding, operands: tuple[Layout | tuple[int, ...], ...], itemsizes: tuple[int, ...]) -> int:
    """The bytes of a call by counting: what each rank lacks, operand by operand, and a ring's share of a reduction."""
    total = 0
    for need, operand, itemsize in zip(sharding.needs, operands, itemsizes, strict=True):
        if isinstance(operand, Layout):
            lacking = (len(elements(need.layout, rank) - elements(operand, rank)) for rank in MESH.ranks)
            total += itemsize * max(lacking)
    return total + reduced(sharding, itemsizes)


def reduced(sharding: OpSharding, itemsizes: tuple[int, ...]) -> int:
    """A ring's share of the reduction of a result."""
    count = math.prod(MESH.sizes[axis] for axis, _ in sharding.output.partial)
    cuts = [1 if cut is None else cut.pieces.count for cut in sharding.output.dims]
    part = math.prod(-(-size // pieces) for size, pieces in zip(sharding.output.shape, cuts, strict=True))
    return max(itemsizes) * (2 * (count - 1) * part // count)


def every_choice(rule: Rule, operands: tuple[Layout | tuple[int, ...], ...]) -> list[dict[str, DimCut]]:
    """All assignments of cuts to letters, by trying each way to cut or not to cut each letter."""
    options: dict[str, set[DimCut]] = {}
    stays: dict[str, set[DimCut]] = {}
    homeless = []
    sizes: dict[str, int] = {}
    for letters, operand in zip(rule.inputs, operands, strict=True):
        shape = operand.shape if isinstance(operand, Layout) else operand
        sizes.update((letter, n) for letter, n in zip(letters, shape, strict=True) if letter)
        for letter, cut in zip(letters, getattr(operand, "dims", ()), strict=False):
            if cut and letter and letter not in rule.whole:
                stays.setdefault(letter, set()).add(cut)
            elif cut:
                homeless.append((letters, cut.axes))
    options = {letter: set(cuts) for letter, cuts in stays.items()}
    for letters, axes in homeless:
        for letter in {x for x in letters if x and x not in rule.whole and x in rule.output}:
            before = [cut.axes for cut in stays.get(letter, ()) if not set(cut.axes) & set(axes)]
            for over in [axes, *(more + axes for more in before)]:
                count = math.prod(MESH.sizes[axis] for axis in over)
                options.setdefault(letter, set()).add(DimCut(over, chunked(sizes[letter], count)))
    found = []
    for picks in every_combination(*([None, *cuts] for cuts in options.values())):
        chosen = {letter: cut for letter, cut in zip(options, picks, strict=True) if cut is not None}
        axes = [axis for cut in chosen.values() for axis in cut.axes]
        if len(axes) != len(set(axes)):
            continue
        if not any(
            letter not in chosen and not set(cut.axes) & set(axes) for letter, cuts in stays.items() for cut in cuts
        ):
            found.append(chosen)
    return found


@examples(300)
@given(calls(), st.lists(st.sampled_from((1, 2, 4, 8)), min_size=3, max_size=3))
def test_no_choice_moves_fewer_bytes(call, sizes):
    rule, operands = call
    itemsizes = tuple(sizes[: len(operands)])
    sharding = propagate(rule, operands, itemsizes)
    base = next(x for x in operands if isinstance(x, Layout))
    spent = moved(sharding, operands, itemsizes)
    others = [recipe_for(rule, operands, choice, base) for choice in every_choice(rule, operands)]
    assert sharding in others
    assert spent == min(moved(other, operands, itemsizes) for other in others)


@examples(100)
@given(calls())
def test_an_operand_that_is_the_only_one_with_a_layout_moves_only_where_a_letter_is_whole(call):
    rule, operands = call
    sharding = propagate(rule, operands)
    split = [i for i, x in enumerate(operands) if isinstance(x, Layout) and not x.is_replicated]
    if len(split) == 1:
        cuts = zip(rule.inputs[split[0]], operands[split[0]].dims, strict=True)
        may_stay = all(cut is None or (letter and letter not in rule.whole) for letter, cut in cuts)
        assert sharding.needs[split[0]].moves != may_stay


@pytest.mark.parametrize("world", [64, 4096, 16384])
def test_the_cost_of_a_large_world_is_told_from_a_few_ranks(world):
    side = math.isqrt(world)
    mesh = Mesh((("dp", side), ("tp", side)))
    shape = (world, world)
    rows, columns, crossed = (
        bind(Spec(*dims), shape, mesh) for dims in ((("dp", "tp"), None), (None, ("dp", "tp")), (("tp", "dp"), None))
    )
    assert world > EVERY
    assert received(rows, columns) == world - 1
    assert received(rows, bind(Replicate(), shape, mesh)) == world * world - world
    assert received(rows, crossed) == world, "another order of the axes moves nearly all rows"


def test_the_listed_and_the_flat_receive_what_they_lack():
    boxes = [([0, 0], [4, 3], 0), ([4, 0], [2, 4], 1), ([0, 3], [4, 1], 1)]
    shards = [ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in boxes]
    listed = bind(EnumerableShardingSpec(shards), (6, 4), MESH)
    assert isinstance(listed, ListedLayout)
    columns = cut((6, 4), None, "tp")
    assert received(listed, columns) == max(
        len(elements(columns, rank) - elements(listed, rank)) for rank in MESH.ranks
    )
    assert received(bind(Replicate().flat("dp", "tp"), (6, 4), MESH), cut((6, 4), ("dp", "tp"), None)) == 0


# -- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*RULES, "b !k -> b !k", "1 k, b k -> b k", "() -> ()"])
def test_a_rule_prints_as_it_was_written(text):
    assert str(parse_rule(text)) == text
    assert parse_rule(str(parse_rule(text))) == parse_rule(text)
