"""Classes that look at more than one element at a time step the ShardedTensors and give the dense answer."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from harness import device
from models import LAYOUTS, assert_equal, dense, set_grads, shard, sharded, whole

import shardtensor as st

MATRICES = [name for name, (shape, _) in LAYOUTS.items() if len(shape) == 2]


class LastOfAll(torch.optim.Optimizer):
    """An optimizer that torch does not know: steps against the gradient's largest magnitude."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(state["sum"] / p.grad.abs().max() * group["lr"])
        return loss


class Doubled(torch.optim.SGD):
    """A subclass of an elementwise class that does otherwise."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * p.grad.sum() * group["lr"])


CLASSES = {
    "Muon": (torch.optim.Muon, {"lr": 0.01}, MATRICES, {"rtol": 2e-2, "atol": 2e-3}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}, list(LAYOUTS), {"rtol": 1e-5, "atol": 1e-6}),
    "Adafactor foreach": (
        torch.optim.Adafactor,
        {"lr": 0.1, "foreach": True},
        list(LAYOUTS),
        {"rtol": 1e-5, "atol": 1e-6},
    ),
    "unknown": (LastOfAll, {"lr": 0.1}, list(LAYOUTS), {"rtol": 1e-5, "atol": 1e-6}),
    "subclass": (Doubled, {"lr": 0.1}, list(LAYOUTS), {"rtol": 1e-5, "atol": 1e-6}),
}


def may_gather(body):
    """Let operations without a rule gather: what counts here is the answer."""

    @functools.wraps(body)
    def run(**kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", st.GatherWarning)
            return body(**kwargs)

    return run


@may_gather
def parity(name):
    cls, options, names, close = CLASSES[name]
    oracle = dense(names=names)
    model = sharded(oracle)
    plain = cls(oracle.values(), **options)
    ours = st.ShardedOptimizer(model, cls, **options)
    for step in range(3):
        set_grads(step, oracle, model)
        plain.step()
        ours.step()
        ours.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = options["lr"] / 2
    assert_equal(model, oracle, name, **close)
    again = st.ShardedOptimizer(model, cls, **options)
    again.load_state_dict(ours.state_dict())
    set_grads(3, oracle, model)
    plain.step()
    again.step()
    assert_equal(model, oracle, name, **close)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_it_equals_the_dense_run(world, size, name):
    world(parity, size, name=name)


@may_gather
def lbfgs():
    def train(weight, make):
        optimizer = make({"weight": weight})
        x = torch.linspace(-1, 1, 21).view(7, 3).to(weight.device)

        def closure():
            optimizer.zero_grad()
            loss = (torch.nn.functional.linear(x, whole(weight)) - 1).square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return losses, whole(weight).detach()

    full = torch.arange(15.0, device=device()).view(5, 3) / 10
    options = {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    want = train(torch.nn.Parameter(full.clone()), lambda p: torch.optim.LBFGS(p.values(), **options))
    spec = LAYOUTS["columns"][1]
    got = train(shard(full, spec), lambda p: st.ShardedOptimizer(p, torch.optim.LBFGS, **options))
    assert got[0] == pytest.approx(want[0], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_lbfgs_equals_the_dense_run(world, size):
    world(lbfgs, size)


@may_gather
def under_fully_shard(make, nesterov):
    shapes = [(9, 4), (4, 9), (5, 5), (3, 1)]
    oracle = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape, device=device())) for shape in shapes)
    model = torch.nn.Sequential(*[torch.nn.Linear(c, r, bias=False, device=device()) for r, c in shapes])
    for layer in model:
        torch.nn.init.zeros_(layer.weight)
    st.fully_shard(model[0])
    st.fully_shard(model)
    # One iteration: five of them multiply what bfloat16 rounds until it is a tenth of the values, in dense runs too.
    options = {"lr": 1.0, "weight_decay": 0.0, "nesterov": nesterov, "ns_steps": 1}
    plain, ours = torch.optim.Muon(oracle.parameters(), **options), make(model.named_parameters(), **options)
    for step in range(2):
        for i, (want, layer) in enumerate(zip(oracle, model, strict=True)):
            torch.manual_seed(10 * step + i)
            want.grad = torch.nn.init.orthogonal_(torch.empty_like(want))
            layer.weight.grad = want.grad.clone()
        plain.step()
        ours.step()
        for want, layer in zip(oracle, model, strict=True):
            torch.testing.assert_close(layer.weight.full_tensor(), want.detach(), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "make", [torch.optim.Muon, functools.partial(st.ShardedOptimizer, optimizer_class=torch.optim.Muon)]
)
def test_muon_steps_fully_sharded_matrices_of_any_shape(world, size, make, nesterov):
    world(under_fully_shard, size, make=make, nesterov=nesterov)
