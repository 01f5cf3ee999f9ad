"""Units take turns in few pieces of memory: in any order of use, no gather goes where one computes."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp.twins import same_gradients
from harness import device
from torch import nn

from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.fsdp import fully_shard

sim, both = pytest.mark.worlds("sim"), pytest.mark.worlds("sim", "gloo")
WIDTH = 96  # 96 * 96 float64 are above 64 KiB


class Layer(nn.Linear):
    """A linear layer that first calls others, which are no submodules of it."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.calls = []

    def forward(self, x):
        for other in self.calls:
            x = torch.tanh(other(x))
        return super().forward(x)


class Net(nn.Module):
    """Layers that run in an order of their own."""

    def __init__(self, order, calls):
        super().__init__()
        self.layers, self.order, self.calls = nn.ModuleList(Layer() for _ in range(6)), order, calls

    def forward(self, x):
        for caller, called in self.calls:
            self.layers[caller].calls = [self.layers[called]]
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return x


def _twins(order, calls, ahead, **options):
    torch.manual_seed(0)
    dense = Net(order, calls).double().to(device())
    model = copy.deepcopy(dense)
    for i, layer in enumerate(model.layers):
        fully_shard(layer, **{"reshard_after_forward": True} | (options if i in dict(calls) else {}))
    fully_shard(model)
    if ahead != 1:
        for layer in model.layers:
            layer.set_modules_to_forward_prefetch(list(model.layers)[:ahead])
            layer.set_modules_to_backward_prefetch(list(model.layers)[:ahead])
    return dense, model


def _steps(order, calls, ahead, **options):
    dense, model = _twins(order, calls, ahead, **options)
    group = as_group()
    for step in range(3):  # the first one learns the order, by which later ones gather ahead
        whole = torch.randn(group.size * 2, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        whole = whole.to(device())
        mine = whole[group.index * 2 :][:2]
        y = model(mine)
        torch.testing.assert_close(y, dense(mine))
        model.zero_grad()
        dense.zero_grad()
        y.square().mean().backward()
        dense(whole).square().mean().backward()
        same_gradients(dense, model)


ORDERS = [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (0, 2, 4, 1, 3, 5), (0, 3, 1, 4, 2, 5), (0, 0, 2, 1, 2, 3, 4, 5)]


@sim
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_units_run_in_any_order(world, order, ahead):
    world(_steps, 2, order=order, calls=(), ahead=ahead)


APART = [((0, 1),), ((0, 3), (4, 5)), ((1, 2),)]  # two pieces of memory: of those with even and with odd numbers


@both
@pytest.mark.parametrize("calls", APART, ids=str)
def test_a_unit_calls_another_one(world, calls):
    called = dict(calls).values()
    world(_steps, 2, order=tuple(i for i in range(6) if i not in called), calls=calls, ahead=1)


def _refused():
    _, model = _twins((0, 1, 3, 4, 5), ((0, 2),), 1)
    with pytest.raises(RuleError) as caught:
        model(torch.ones(2, WIDTH, dtype=torch.float64, device=device()))
    return str(caught.value)


@both
def test_both_in_one_piece_of_memory(world):
    expected = """\
a fully sharded module called another one that is no submodule of it, and both take turns in one piece of memory
  module  layers.0 (Layer)
  called  layers.2 (Layer)
  either  make the other a submodule of the caller, and shard that after it
  or      fully_shard(caller, reshard_after_forward=False) keeps the caller in memory of its own"""
    assert world(_refused, 2) == [expected] * 2


@sim
def test_the_caller_in_memory_of_its_own(world):
    world(_steps, 2, order=(0, 1, 3, 4, 5), calls=((0, 2),), ahead=1, reshard_after_forward=False)
