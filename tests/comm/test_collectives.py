"""Each collective against the dense function, and each backward against the adjoint law <A x, y> = <x, A* y>."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from harness import device, every_size
from torch.autograd import forward_ad

from shardtensor.comm import collectives, redistribute
from shardtensor.comm.group import Group, SingleRankGroup
from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.layout.route import DimStep
from shardtensor.spec.nodes import Cut

COUNTS = [(2, 2, 2, 2), (3, 1, 4, 2), (0, 5, 0, 1)]


@torch.compiler.assume_constant_result
def step(counts: Sequence[int], sums: bool = False) -> DimStep:
    return DimStep("", cut=Cut("tp", sizes=tuple(counts)), sums=sums)


def local_slice(x: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
    return redistribute.local_slice(x, step(counts), group)


def all_gather(x: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
    return redistribute.all_gather(x, step(counts), group)


def gathered_for_split_work(x: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
    return redistribute.all_gather(x, step(counts, sums=True), group)


def reduced_and_scattered(x: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
    return redistribute.reduce_scatter(x, step(counts), group)


def numbers(count: int, seed: int) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (count,), generator=generator).double().to(device())


def check_adjoints() -> None:
    group = as_group()
    n, me = group.size, group.index

    def dot(kind: str, a: torch.Tensor, b: torch.Tensor) -> float:
        """The inner product of whole values: a copy counts once, terms and parts count on every rank."""
        value = (a.flatten() * b.flatten()).sum()
        return (value if kind == "copy" else group.all_reduce(value.clone())).item()

    def draw(kind: str, count: int, seed: int) -> torch.Tensor:
        return numbers(count, seed if kind == "copy" else seed + 1 + me)

    table = [[(r + 2 * d) % 3 for d in range(n)] for r in range(n)]
    send, recv = table[me], [table[r][me] for r in range(n)]
    cases = [("copy", 6, "partial", 6, lambda x: collectives.sum_gradient(x, group))]
    cases += [("partial", 6, "copy", 6, lambda x: collectives.all_reduce(x, group))]
    cases += [("part", sum(send), "part", sum(recv), lambda x: collectives.all_to_all(x, send, recv, group))]
    for pattern in COUNTS:
        counts = pattern[:n]
        own, total = counts[me], sum(counts)
        cases += [
            ("copy", total, "part", own, lambda x, c=counts: local_slice(x, c, group)),
            ("part", own, "copy", total, lambda x, c=counts: all_gather(x, c, group)),
            ("part", own, "partial", total, lambda x, c=counts: gathered_for_split_work(x, c, group)),
            ("partial", total, "part", own, lambda x, c=counts: reduced_and_scattered(x, c, group)),
        ]
    for source, count, target, result_count, move in cases:
        x = draw(source, count, 10).requires_grad_()
        y = draw(target, result_count, 20).requires_grad_()
        out = move(x)
        (grad,) = torch.autograd.grad(out, x, y, create_graph=True)
        assert dot(target, out.detach(), y.detach()) == dot(source, x.detach(), grad.detach())
        # The backward is linear in y; its own backward is the forward again.
        z = draw(source, count, 30)
        if grad.requires_grad:
            (second,) = torch.autograd.grad(grad, y, z)
            assert torch.equal(second, move(z))
        # Nothing asks for a gradient: the same values, and no graph.
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(move(x.detach()), out)
        assert not move(x.detach()).requires_grad


@pytest.mark.worlds("sim", "gloo")
@every_size
def test_adjoints(world, size):
    world(check_adjoints, size)


def check_dense() -> None:
    group = as_group()
    n, me = group.size, group.index
    for pattern in COUNTS:
        counts = pattern[:n]
        full = numbers(sum(counts), 5)
        part = full.split(counts)[me]
        assert torch.equal(local_slice(full, counts, group), part)
        assert torch.equal(all_gather(part, counts, group), full)
        assert torch.equal(gathered_for_split_work(part, counts, group), full)
        terms = [numbers(sum(counts), r) for r in range(n)]
        assert torch.equal(reduced_and_scattered(terms[me], counts, group), sum(terms).split(counts)[me])
        mine = terms[me].clone()
        assert torch.equal(collectives.all_reduce(mine, group), sum(terms))
        assert torch.equal(mine, terms[me]), "all_reduce leaves its argument alone"


@pytest.mark.worlds("sim", "gloo")
@every_size
def test_values_are_the_dense_ones(world, size):
    world(check_dense, size)


def check_split_mlp() -> None:
    """Column, then row: f, two products, g give the dense output and gradients."""
    group = as_group()
    n, me = group.size, group.index
    x, up, down = numbers(12, 1).view(3, 4), numbers(28, 2).view(7, 4), numbers(35, 3).view(5, 7)
    dense = [t.clone().requires_grad_() for t in (x, up, down)]
    F.linear(F.relu(F.linear(dense[0], dense[1])), dense[2]).square().sum().backward()

    split = [t.clone().requires_grad_() for t in (x, up.tensor_split(n)[me], down.tensor_split(n, 1)[me])]
    hidden = F.relu(F.linear(collectives.sum_gradient(split[0], group), split[1]))
    collectives.all_reduce(F.linear(hidden, split[2]), group).square().sum().backward()
    assert torch.equal(split[0].grad, dense[0].grad)
    assert torch.equal(split[1].grad, dense[1].grad.tensor_split(n)[me])
    assert torch.equal(split[2].grad, dense[2].grad.tensor_split(n, 1)[me])


@pytest.mark.worlds("sim", "gloo")
@every_size
def test_f_and_g_make_a_split_mlp_equal_the_dense_one(world, size):
    world(check_split_mlp, size)


def test_alone_they_return_their_argument():
    alone, x = SingleRankGroup(), torch.ones(3, requires_grad=True)
    assert collectives.sum_gradient(x, alone) is x
    assert collectives.all_reduce(x, alone) is x
    for result in (
        local_slice(x, (3,), alone),
        all_gather(x, (3,), alone),
        gathered_for_split_work(x, (3,), alone),
        reduced_and_scattered(x, (3,), alone),
        collectives.all_to_all(x, (3,), (3,), alone),
    ):
        assert result.data_ptr() == x.data_ptr()
        assert result.requires_grad


def check_compiled(name: str) -> None:
    group = as_group()
    n, me = group.size, group.index
    counts, lopsided = (3, 1, 4, 2)[:n], (0, 6, 0, 0)[:n]
    moves = {
        "sum_gradient": (6, lambda x: collectives.sum_gradient(x, group)),
        "all_reduce": (6, lambda x: collectives.all_reduce(x, group)),
        "local_slice": (sum(counts), lambda x: local_slice(x, counts, group)),
        "all_gather": (counts[me], lambda x: all_gather(x, counts, group)),
        "lopsided all_gather": (lopsided[me], lambda x: all_gather(x, lopsided, group)),
        "reduce_scatter": (sum(counts), lambda x: reduced_and_scattered(x, counts, group)),
        "all_to_all": (2 * n, lambda x: collectives.all_to_all(x, [2] * n, [2] * n, group)),
    }
    count, move = moves[name]
    results = []
    for run in (move, torch.compile(move, backend="aot_eager", fullgraph=True)):
        x = numbers(count, 3 + me).requires_grad_()
        out = run(x * 2)
        (out * out.detach()).sum().backward()
        results.append((out.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    "name",
    ["sum_gradient", "all_reduce", "local_slice", "all_gather", "lopsided all_gather", "reduce_scatter", "all_to_all"],
)
def test_compiled_they_are_one_graph_with_the_same_values(world, name):
    world(check_compiled, 2, name=name, timeout_s=180.0)


def check_unrecorded() -> None:
    """Where nothing asks for a gradient there is no graph, and what moves nothing is the argument itself."""
    group = as_group()
    x, leaf = torch.ones(6), torch.ones(6, requires_grad=True)
    assert collectives.sum_gradient(x, group) is x and collectives.sum_gradient(leaf, group) is not leaf
    with torch.no_grad():
        assert collectives.sum_gradient(leaf, group) is leaf
    for level in range(2):
        with forward_ad.dual_level():
            assert forward_ad._current_level == 0 <= level
            for move in (
                lambda: collectives.sum_gradient(x, group),
                lambda: collectives.all_reduce(leaf, group),
                lambda: local_slice(x, [3] * group.size, group),
            ):
                with pytest.raises(RuleError, match="a collective would lose the tangents"):
                    move()


@pytest.mark.worlds("sim")
def test_what_needs_no_gradient_makes_no_graph_and_forward_mode_is_refused(world):
    world(check_unrecorded, 2)


def check_graphs_end_with_their_results():
    group = as_group()
    counts = [4] * group.size
    whole, part = torch.ones(sum(counts), device=device()), torch.ones(4, device=device())
    for call, value in (
        (lambda x: collectives.all_reduce(x, group), whole),
        (lambda x: all_gather(x, counts, group), part),
        (lambda x: reduced_and_scattered(x, counts, group), whole),
        (
            lambda x: collectives.all_to_all(x, [4 // group.size] * group.size, [4 // group.size] * group.size, group),
            part,
        ),
    ):
        leaf = value.clone().requires_grad_()
        for _ in range(200):
            call(leaf * 1)
            assert leaf._use_count() == 1, "a thread of the backend keeps the graph"


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [2, 4])
def test_a_graph_ends_with_its_result(world, size):
    world(check_graphs_end_with_their_results, size)
