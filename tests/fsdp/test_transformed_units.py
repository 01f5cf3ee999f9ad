"""Transforms of torch.func over fully sharded modules: one error, whose ways out give the gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp.twins import same_gradients
from harness import device
from torch import func, nn

from shardtensor import unshard_module
from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.fsdp import fully_shard

sim, both = pytest.mark.worlds("sim"), pytest.mark.worlds("sim", "gloo")

TRANSFORMS = {
    "grad": lambda f, x: func.grad(lambda x: f(x).square().sum())(x),
    "vjp": lambda f, x: func.vjp(f, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "jvp": lambda f, x: func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: func.vmap(f)(x),
    "functionalize": lambda f, x: func.functionalize(f)(x),
}


def _twins():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double().to(device())
    model = copy.deepcopy(dense)
    fully_shard(model[0])
    x = torch.randn(as_group().size, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return dense, fully_shard(model), x.to(device())


def _refused(name):
    dense, model, x = _twins()
    with pytest.raises(RuleError) as caught:
        TRANSFORMS[name](model, x[as_group().index])
    for each, batch in ((dense, x), (model, x[as_group().index])):
        each(batch).square().mean().backward()
    same_gradients(dense, model)
    with pytest.raises(RuleError, match=r"inside of a torch\.func transform"):  # also where it has run before
        TRANSFORMS[name](model, x[as_group().index])
    return str(caught.value)


EXPECTED = """\
a fully sharded module was called inside of a torch.func transform (grad, vjp, jvp, vmap, ...)
  module  (Sequential)
  why     a gather is no operation that could be transformed
  either  torch.autograd.grad(loss, inputs), or loss.backward() and param.grad, give the same gradients
  or      shardtensor.unshard_module(module) makes it a plain module, to transform the function of that"""


@sim
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_refused_and_leaves_no_trace(world, name):
    assert world(_refused, 2, name=name) == [EXPECTED] * 2


def _followed():
    dense, model, x = _twins()
    mine = x[as_group().index].clone().requires_grad_()
    expected = TRANSFORMS["grad"](dense, mine.detach())
    [grad] = torch.autograd.grad(model(mine).square().sum(), mine)
    torch.testing.assert_close(grad, expected)
    unshard_module(model)
    torch.testing.assert_close(TRANSFORMS["grad"](model, mine.detach()), expected)


@both
def test_the_ways_out(world):
    world(_followed, 2)


def _of_parameters():
    _, model, x = _twins()
    with pytest.raises(RuleError, match=r"torch\.func transform"):
        func.grad(lambda params: func.functional_call(model, params, (x[0],)).sum())(dict(model.named_parameters()))


@sim
def test_a_transform_by_parameters_is_refused(world):
    world(_of_parameters, 2)
