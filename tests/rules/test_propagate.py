"""A recipe makes local computations add up to the dense one, forward and backward; checked rank by rank on integers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtensor.layout.bind import bind
from shardtensor.layout.layout import CutLayout, Layout
from shardtensor.mesh import Mesh
from shardtensor.rules.propagate import follow, propagate
from shardtensor.rules.rule import Rule, parse_rule, pointwise
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
    recipe = propagate(rule, operands)
    assert recipe is not None
    _check_letters(rule, [need.layout for need in recipe.needs] + [recipe.output])
    generator = torch.Generator().manual_seed(0)
    shapes = [x.shape if isinstance(x, Layout) else x for x in operands]
    dense = [torch.randint(-4, 5, shape, generator=generator).double().requires_grad_() for shape in shapes]
    expected = product(rule, dense)
    weight = torch.randint(-4, 5, expected.shape, generator=generator).double()
    (expected * weight).sum().backward()
    locals_, results = {}, {}
    for rank in MESH.ranks:
        locals_[rank] = [
            part(x.detach(), need.layout, rank).requires_grad_() for x, need in zip(dense, recipe.needs, strict=True)
        ]
        results[rank] = product(rule, locals_[rank])
        assert tuple(results[rank].shape) == recipe.output.local_shape(rank)
        if results[rank].requires_grad:
            results[rank].backward(part(weight, recipe.settled, rank))
    summed = [axis for axis, _ in recipe.output.partial]
    assert recipe.output.reduced() == recipe.settled
    for rank in MESH.ranks:
        total = sum(results[other].detach() for other in MESH.ranks_along(rank, summed))
        assert torch.equal(total, part(expected.detach(), recipe.settled, rank))
        for i, need in enumerate(recipe.needs):
            grads = [locals_[other][i].grad for other in MESH.ranks_along(rank, need.addend_axes)]
            assert torch.equal(sum(grads), part(dense[i].grad, need.layout, rank))


def _check_letters(rule: Rule, layouts: list[CutLayout]) -> None:
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
        rule = pointwise(tuple(shapes), shape)
    operands = tuple(draw(layouts(shape)) for shape in shapes)
    if not any(isinstance(operand, Layout) for operand in operands):
        operands = (bind(Replicate(), shapes[0], MESH), *operands[1:])
    return rule, operands


@settings(max_examples=300, deadline=None)
@given(calls())
def test_local_results_add_up_to_the_dense_one(call):
    check(*call)


# -- what is chosen --------------------------------------------------------------------------------------------------


def cut(shape: tuple[int, ...], *dims: str | None) -> Layout:
    return bind(Spec(*(None if dim is None else Cut(dim, balanced=True) for dim in dims)), shape, MESH)


def recipe_of(rule: str, *operands: Layout | tuple[int, ...]):
    recipe = propagate(parse_rule(rule), operands)
    assert recipe is not None
    check(parse_rule(rule), operands)
    return recipe


def test_a_column_parallel_linear_moves_nothing():
    recipe = recipe_of("b k, n k -> b n", (5, 4), cut((6, 4), "tp", None))
    assert [need.moves for need in recipe.needs] == [False, False]
    assert [need.addend_axes for need in recipe.needs] == [(1,), ()]
    assert recipe.output == cut((5, 6), None, "tp")


def test_a_row_parallel_linear_leaves_a_sum():
    recipe = recipe_of("b k, n k -> b n", cut((5, 6), None, "tp"), cut((4, 6), None, "tp"))
    assert not any(need.moves for need in recipe.needs)
    assert recipe.output.partial == ((1, "sum"),)
    assert recipe.settled.is_replicated


def test_an_axis_on_two_letters_stays_with_the_larger_operand():
    large, small = cut((9, 6), "tp", None), cut((4, 6), None, "tp")
    recipe = recipe_of("b k, n k -> b n", large, small)
    assert [need.moves for need in recipe.needs] == [False, True]
    assert recipe.needs[1].layout.cut_dims == ()
    assert recipe.output == cut((9, 4), "tp", None)
    recipe = recipe_of("b k, n k -> b n", cut((2, 6), "tp", None), cut((4, 6), None, "tp"))
    assert [need.moves for need in recipe.needs] == [True, False]
    assert recipe.output.partial == ((1, "sum"),)


def test_one_letter_cut_in_two_ways_follows_the_larger_operand():
    recipe = recipe_of("b k, k n -> b n", cut((5, 6), None, "tp"), cut((6, 4), "dp", None))
    assert [need.moves for need in recipe.needs] == [False, True]
    assert recipe.needs[1].layout == cut((6, 4), "tp", None)


def test_two_axes_on_two_letters_both_stay():
    recipe = recipe_of("b k, n k -> b n", cut((5, 4), "dp", None), cut((6, 4), "tp", None))
    assert not any(need.moves for need in recipe.needs)
    assert recipe.output == cut((5, 6), "dp", "tp")
    assert [need.addend_axes for need in recipe.needs] == [(1,), (0,)]


def test_a_whole_letter_is_gathered():
    recipe = recipe_of("b !k -> b !k", cut((5, 6), "dp", "tp"))
    assert recipe.needs[0].moves
    assert recipe.output == cut((5, 6), "dp", None)


def test_a_dim_that_broadcasts_is_a_copy():
    rule = pointwise(((5, 6), (5, 1)), (5, 6))
    operands = (cut((5, 6), None, "tp"), (5, 1))
    check(rule, operands)
    assert propagate(rule, operands).needs[1].addend_axes == (1,)


def test_operands_on_another_grid_move():
    other = bind(ChunkShardingSpec(0, ["rank:0-1/cpu"]), (5, 4), MESH)
    recipe = propagate(parse_rule("b k, b k -> b k"), (cut((5, 4), "tp", None), other))
    assert [need.moves for need in recipe.needs] == [False, True]
    assert recipe.needs[1].layout == recipe.needs[0].layout


def test_boxes_written_out_have_no_recipe():
    boxes = [ShardMetadata([i * 2, 0], [2, 4], f"rank:{i % 2}/cpu") for i in range(3)]
    listed = bind(EnumerableShardingSpec(boxes), (6, 4), MESH)
    flat = bind(Replicate().flat("dp"), (6, 4), MESH)
    rule = parse_rule("b k, b k -> b k")
    assert propagate(rule, (listed, flat)) is None
    recipe = propagate(rule, (listed, cut((6, 4), "tp", None)))
    assert [need.moves for need in recipe.needs] == [True, False]


@pytest.mark.parametrize("shape", [(5, 6), (6,), (1, 6), (5, 1), (1,), ()])
def test_what_follows_is_cut_where_it_is_long_enough(shape):
    layout = cut((5, 6), "dp", "tp")
    expected = [layout.dims[len(layout.dims) - len(shape) + i] if n > 1 else None for i, n in enumerate(shape)]
    assert list(follow(layout, shape).dims) == expected
    full = torch.arange(30).view(5, 6)
    for rank in MESH.ranks:
        mine = part(torch.arange(math.prod(shape)).view(shape), follow(layout, shape), rank)
        expected = part(torch.arange(math.prod(shape)).view(shape).expand(5, 6).contiguous(), layout, rank)
        assert torch.equal(mine.expand(part(full, layout, rank).shape), expected)


# -- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*RULES, "b !k -> b !k", "1 k, b k -> b k", "() -> ()"])
def test_a_rule_prints_as_it_was_written(text):
    assert str(parse_rule(text)) == text
    assert parse_rule(str(parse_rule(text))) == parse_rule(text)
