"""Ranks compare programs while they compute: what a rank computed for another program leaves no trace."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import FULL
from spmd_steps import STYLES, compiled, plain_step, same_modules
from torch import nn

from shardtensor.comm.process_group import as_group
from shardtensor.spmd import assembly
from shardtensor.spmd.comparison import NO_PROGRAM, SUMS, Comparison, OtherProgram
from shardtensor.spmd.segments import split


def sums_of_numbers(programs):
    rank = dist.get_rank()
    comparison = Comparison(as_group(None), programs[rank])
    numbers = [
        torch.tensor(2**53 + 2 * rank),
        torch.tensor(0.1 + rank),
        torch.tensor(rank, dtype=torch.float64) / 3,
        torch.tensor(rank + 1, dtype=torch.bfloat16),
    ]
    numbers += [torch.tensor(rank)] * (SUMS - len(numbers))
    pending = comparison.start(numbers)
    try:
        return [(x.item(), x.dtype) for x in comparison.wait(pending, numbers)]
    except OtherProgram:
        return "another program"


def test_sums_of_all_ranks(world):
    (first, second) = world(sums_of_numbers, 2, programs=[5, 5])
    assert first == second
    assert [x for x, _ in first] == [2**54 + 2, pytest.approx(1.2), pytest.approx(1 / 3), 3.0, 1, 1, 1]
    assert [str(dtype) for _, dtype in first[:4]] == ["torch.int64", "torch.float32", "torch.float64", "torch.bfloat16"]


@pytest.mark.parametrize("programs", [[5, 6], [5, NO_PROGRAM], [NO_PROGRAM] * 2])
def test_another_program_on_one_rank(world, programs):
    assert world(sums_of_numbers, 2, programs=programs) == ["another program"] * 2


def drawing():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 3))


def kinds_without_overlap(style):
    """As in large steps: nothing is computed while ranks compare programs."""
    with mock.patch.object(assembly, "split", lambda graph, also, group, _: split(graph, also, group, overlaps=False)):
        return kinds_in_turns(style)


def kinds_in_turns(style):
    """Sizes of batches that one rank, or both, have had before, or not: kept programs beside new ones."""
    torch.manual_seed(0)
    module, other = drawing(), drawing()
    other.load_state_dict(module.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, other)]
    kept, new = compiled(plain_step, style), compiled(plain_step, style)
    torch.manual_seed(1 + dist.get_rank())
    compiles = []
    for sizes in ((4, 4), (4, 2), (4, 4), (2, 4), (4, 2), (2, 2), (4, 4)):
        rows = sizes[dist.get_rank()]
        batch, random = (torch.randn(rows, 5), torch.randn(rows, 3)), torch.get_rng_state()
        loss = kept(module, optimizers[0], batch)
        after = torch.get_rng_state()
        torch.set_rng_state(random)
        new.reset()
        assert torch.equal(loss, new(other, optimizers[1], copy.deepcopy(batch)))
        assert torch.equal(after, torch.get_rng_state()), "the state of the generator"
        same_modules(module, other)
        compiles.append(kept.compiles)
    return compiles


@pytest.mark.parametrize("style", STYLES[: 1 + FULL])
@pytest.mark.parametrize("run", [kinds_in_turns, kinds_without_overlap][: 1 + FULL])
def test_a_kept_program_does_what_a_new_one_does(world, style, run):
    assert world(run, 2, style=style) == [[1, 2, 2, 3, 3, 4, 4]] * 2


def masked_step(model, optimizer, batch):
    """More sums of the batch than a comparison has place for, of integers and of floats."""
    x, masks = batch
    optimizer.zero_grad()
    errors = model(x).pow(2).mean(1)
    loss = sum((errors * mask).sum() / mask.sum() for mask in masks.unbind(1))
    loss = loss + errors.sum() / (x > 0).sum()
    loss.backward()
    optimizer.step()
    return loss


def masked(style):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    dense, optimizers = copy.deepcopy(model), []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, dense)]
    run = compiled(masked_step, style)
    for _ in range(3):
        x, masks = torch.randn(8, 5), (torch.rand(8, SUMS + 1) > 0.3).float()
        own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        loss = run(model, optimizers[0], (x[own], masks[own]))
        torch.testing.assert_close(loss, masked_step(dense, optimizers[1], (x, masks)))
        same_modules(model, dense, exact=False)


@pytest.mark.parametrize("style", STYLES[: 1 + FULL])
def test_sums_of_masks_are_those_of_all_ranks(world, style):
    world(masked, 2, style=style)
