"""Gathers and reduce-scatters along any dim are `cat`, slices and sums of the whole; each gradient is the adjoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import attrs
import pytest
import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.comm.process_group import as_group
from shardtensor.comm.redistribute import (
    PendingReduceScatter,
    all_gather,
    as_nothing,
    local_slice,
    move_along,
    reduce_scatter,
    run_moves,
)
from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.route import DimStep
from shardtensor.mesh import read_mesh
from shardtensor.spec.nodes import Cut
from shardtensor.spec.parse import parse_spec


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def gathered_for_split_work(x: torch.Tensor, step: DimStep, group: Group) -> torch.Tensor:
    return all_gather(x, attrs.evolve(step, sums=True), group)


def cases(size: int) -> Iterator[tuple[tuple[int, ...], DimStep, list[int]]]:
    """Shapes of the whole, how a dim is cut, and the size of each slice."""
    for shape in ((2, 3, 4), (1, 3, 2), (3, 1)):
        for dim in range(-len(shape), len(shape)):
            lead = shape[:dim] if dim >= 0 else shape[: len(shape) + dim]
            rest = shape[len(lead) + 1 :]
            even, uneven = [2] * size, [2 if i < 1 else 1 for i in range(size)]
            lopsided = [0, 3, 1, 0][:size] if size > 1 else [3]
            for sizes, cut in (
                (even, None),
                (even, Cut("tp", balanced=True)),
                (uneven, Cut("tp", balanced=True)),
                (lopsided, Cut("tp", sizes=tuple(lopsided))),
                (even, Cut("tp", sizes=tuple(even))),
            ):
                yield (*lead, sum(sizes), *rest), DimStep("", dim=dim, cut=cut), sizes


def check() -> None:
    group = as_group()
    me = group.index
    for shape, step, sizes in cases(group.size):
        dim = step.dim
        whole = numbers(shape, 1)
        part = whole.split(sizes, dim)[me].clone()
        terms = [numbers(shape, 2 + rank) for rank in range(group.size)]
        mine = sum(terms).split(sizes, dim)[me]
        for get in (all_gather, gathered_for_split_work):
            assert torch.equal(get(part, step, group), whole)
            assert torch.equal(get(part.mT, attrs.evolve(step, dim=swapped(dim, part.dim())), group), whole.mT)
        assert torch.equal(local_slice(whole, step, group), part)
        for get in (reduce_scatter, lambda *args: PendingReduceScatter(*args).wait()):
            result = get(terms[me], step, group)
            assert torch.equal(result, mine) and result.is_contiguous()
            strided = terms[me].mT.contiguous().mT
            assert torch.equal(get(strided, step, group), mine)


def swapped(dim: int, ndim: int) -> int:
    """Where a dim is when the last two change places."""
    at = dim % ndim
    at = {ndim - 1: ndim - 2, ndim - 2: ndim - 1}.get(at, at)
    return at - ndim if dim < 0 else at


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 3])
def test_the_dense_values(world, size):
    world(check, size)


def check_adjoints() -> None:
    """<A x, y> = <x, A* y>, where a copy counts once, and terms and parts count on every rank."""
    group = as_group()
    me = group.index

    def dot(kind: str, a: torch.Tensor, b: torch.Tensor) -> float:
        value = (a * b).sum()
        return (value if kind == "copy" else group.all_reduce(value.clone())).item()

    def draw(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return numbers(shape, seed if kind == "copy" else seed + 1 + me)

    calls: list[tuple[str, str, Callable[..., torch.Tensor]]] = [
        ("part", "copy", all_gather),
        ("part", "partial", gathered_for_split_work),
        ("copy", "part", local_slice),
        ("partial", "part", reduce_scatter),
    ]
    for (shape, step, sizes), (source, target, move) in product(cases(group.size), calls):
        own = list(shape)
        own[step.dim] = sizes[me]
        shapes = {"part": tuple(own), "copy": shape, "partial": shape}
        x = draw(source, shapes[source], 10).requires_grad_()
        y = draw(target, shapes[target], 20).requires_grad_()
        out = move(x, step, group)
        (grad,) = torch.autograd.grad(out, x, y, create_graph=True)
        assert grad.shape == x.shape
        assert dot(target, out.detach(), y.detach()) == dot(source, x.detach(), grad.detach())
        z = draw(source, shapes[source], 30)
        (second,) = torch.autograd.grad(grad, y, z)  # the backward is linear in y: its own is the forward again
        assert torch.equal(second, move(z, step, group))
        assert not move(x.detach(), step, group).requires_grad
        with torch.no_grad():
            assert torch.equal(move(x, step, group), out)


@pytest.mark.worlds("sim")
def test_gradients_are_the_adjoints(world):
    world(check_adjoints, 3)


def check_fresh() -> None:
    group = as_group()
    terms = [numbers((2, 3), rank) for rank in range(group.size)]
    x = terms[group.index].requires_grad_()
    out = collectives.all_reduce_fresh(x * 1, group)
    assert torch.equal(out, sum(terms))
    (grad,) = torch.autograd.grad(out, x, torch.ones(2, 3) * (group.index + 1.0), create_graph=True)
    assert torch.equal(grad, torch.full((2, 3), group.index + 1.0).double())
    product = (terms[group.index].detach() * 1).t()
    assert torch.equal(collectives.all_reduce_fresh(product, group), sum(terms).t())
    with torch.no_grad():
        mine = terms[group.index].detach().clone()
        assert torch.equal(collectives.all_reduce_fresh(mine, group), sum(terms).detach())


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 3])
def test_a_sum_may_take_the_memory_of_its_term(world, size):
    world(check_fresh, size)


def test_uneven_stretches_have_to_be_asked_for():
    group: Group = SingleRankGroup()
    group.size = 3
    x = torch.ones(2, 7)
    for move in (local_slice, reduce_scatter, PendingReduceScatter):
        with pytest.raises(LayoutError, match="7 elements of dim 1 cannot be cut evenly over 3 ranks") as caught:
            move(x, DimStep("", dim=1), group)
        assert "2 x 7" in str(caught.value) and "multiple of 3" in str(caught.value)
    assert DimStep("", dim=1, cut=Cut("tp", balanced=True)).sizes_of(x.shape, 3) == (3, 2, 2)
    assert DimStep("", cut=Cut("tp", sizes=(1, 1, 0))).sizes_of(x.shape, 3) == (1, 1, 0)


def test_alone_there_is_nothing_to_join():
    alone, x = SingleRankGroup(), numbers((2, 3), 0).requires_grad_()
    for move in (all_gather, local_slice, reduce_scatter):
        out = move(x, DimStep("", dim=1), alone)
        assert torch.equal(out, x) and out.requires_grad


def sums_of_values_and_of_gradients() -> None:
    group = as_group()
    x, total = torch.full((2, 3), group.index + 1.0), group.size * (group.size + 1) / 2
    assert run_moves(x.clone(), (move_along(DimStep("all_reduce"), group),)).eq(total).all()
    leaf = x.clone().requires_grad_()
    y = run_moves(leaf, (move_along(DimStep("sum_gradient"), group),))
    assert torch.equal(y, x)
    (y * (group.index + 1)).sum().backward()
    assert leaf.grad is not None and leaf.grad.eq(total).all()


@pytest.mark.worlds("sim")
def test_partial_sums_are_summed_and_gradients_of_replicas_too(world):
    world(sums_of_values_and_of_gradients, 3)


def test_an_empty_result_gets_the_strides_of_its_shape_and_a_view_stays():
    layout = bind(parse_spec("[tp balanced, -]"), (1, 4), read_mesh("tp=2"))
    x = torch.empty(0, 4)
    assert as_nothing(x.new_empty_strided((0, 4), (0, 0)), layout, 1).stride() == x.stride()
    assert as_nothing(x, layout, 1) is x
    view = torch.empty(0, 1).expand(0, 4)
    assert as_nothing(view, layout, 1) is view
