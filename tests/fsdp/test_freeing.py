"""The memory that units are gathered into is freed by one call, and made anew by the next forward."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp.twins import same_gradients
from harness import device
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.fsdp import free_gathered, fully_shard

sim, both = pytest.mark.worlds("sim"), pytest.mark.worlds("sim", "gloo")
WIDTH = 96  # 96 * 96 float64 are above 64 KiB: units lie in a ring


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _twins(**options):
    torch.manual_seed(0)
    small = nn.Linear(WIDTH, 4), nn.Linear(4, 4)
    dense = nn.Sequential(*(Block() for _ in range(3)), *small).double().to(device())
    model = copy.deepcopy(dense)
    for layer in model:
        fully_shard(layer, **options)
    return dense, fully_shard(model, **options)


def _memory(model):
    """All memory that lies beside the shards."""
    units = model._fsdp_state.runtime.states
    wholes = [flat.unsharded for unit in units for flat in unit.param_groups]
    packed = model._fsdp_state.runtime.reducer._memory.values()
    kept = [part for unit in units if unit.post_forward_mesh is not None for part in unit.post_forward_mesh._kept]
    return [StorageWeakRef(x.untyped_storage()) for x in (*wholes, *packed, *kept)]


def _batch(step):
    group = as_group()
    whole = torch.randn(group.size * 2, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    whole = whole.to(device())
    return whole, whole[group.index * 2 :][:2]


def _step(dense, model, step):
    for each, x in zip((dense, model), _batch(step), strict=True):
        each.zero_grad()
        each(x).square().mean().backward()
    same_gradients(dense, model)
    with torch.no_grad():
        for param in (*dense.parameters(), *model.parameters()):
            param.mul_(1.1)


def _freed(**options):
    dense, model = _twins(**options)
    for step in range(2):
        _, x = _batch(step)
        with torch.no_grad():
            torch.testing.assert_close(model(x), dense(x))
        memory = _memory(model)
        free_gathered(model)
        assert memory and all(storage.expired() for storage in memory)
        free_gathered(model)
        _step(dense, model, step)
        memory = _memory(model)
        free_gathered(model)
        assert memory and all(storage.expired() for storage in memory)
        _step(dense, model, step + 2)
        _step(dense, model, step + 4)


@both
def test_it_is_freed_and_made_anew(world):
    world(_freed, 2)


@sim
@pytest.mark.parametrize("reshard", [False, True, 2])
def test_it_is_whatever_stays_gathered(world, reshard):
    world(_freed, 4, reshard_after_forward=reshard)


def _gathered_by_hand():
    dense, model = _twins()
    model[0].unshard()
    model[1].unshard(async_op=True)
    free_gathered(model)
    _step(dense, model, 0)
    model[0].unshard()
    _step(dense, model, 1)


@sim
def test_units_gathered_by_hand(world):
    world(_gathered_by_hand, 2)


def _in_use():
    dense, model = _twins()
    whole, mine = _batch(0)
    loss = model(mine).square().mean()
    with pytest.raises(RuleError) as caught:
        free_gathered(model)
    loss.backward()
    dense(whole).square().mean().backward()
    same_gradients(dense, model)
    free_gathered(model)
    return str(caught.value)


@both
def test_it_is_refused_while_a_graph_needs_it(world):
    expected = """\
the memory of gathered parameters is in use: the backward of a forward has not run yet
  module  (Sequential)
  fix     call backward first, or drop the results of that forward"""
    assert world(_in_use, 2) == [expected] * 2


def _one_in_use():
    _, model = _twins()
    _, mine = _batch(0)
    model(mine).square().mean().backward()
    loss = model[1](mine.requires_grad_()).square().mean()  # the other units are idle
    with pytest.raises(RuleError, match="is in use"):
        free_gathered(model)
    loss.backward()
    free_gathered(model)


def _too_late():
    dense, model = _twins()
    _step(dense, model, 0)
    loss = model[1](_batch(0)[1]).square().mean()  # its gradients need the input alone
    free_gathered(model)
    with pytest.raises(RuleError, match=r"came after free_gathered\n  module  1 \(Block\)"):
        loss.backward()
    _step(dense, model, 1)


@sim
def test_a_backward_after_it_is_refused(world):
    world(_too_late, 2)


@sim
def test_it_is_refused_while_the_graph_of_one_unit_needs_it(world):
    world(_one_in_use, 2)


def _from_within():
    _, model = _twins()
    model[1].register_forward_hook(lambda *_: free_gathered(model))
    _, x = _batch(0)
    with torch.no_grad(), pytest.raises(RuleError, match="is in use"):
        model(x)


@sim
def test_it_is_refused_while_a_forward_runs(world):
    world(_from_within, 2)
