"""Sharded steps equal dense ones bit for bit: every elementwise class and implementation, uneven and empty shards."""

from __future__ import annotations

import pytest
import torch
from harness import device, every_size
from models import assert_equal, dense, same, set_grads, sharded, whole

import shardtensor as st
from shardtensor.optim.update_units import ELEMENTWISE

OPTIONS = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}],
    "AdamW": [{}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adamax": [{}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "ASGD": [{"t0": 1.0}],
    "Rprop": [{}],
}
FUSED = {"cpu": ("SGD", "Adam", "AdamW", "Adagrad"), "cuda": ("SGD", "Adam", "AdamW")}
STEPS = 3


def variants(name):
    for options in OPTIONS[name]:
        for how in ("foreach", "loop", "fused"):
            if how != "fused" or name in FUSED[device().type]:
                yield {"lr": 0.05, **options, **({"foreach": False} if how == "loop" else {how: True})}


def parity(make):
    for name in OPTIONS:
        cls = getattr(torch.optim, name)
        for options in variants(name):
            oracle = dense()
            model = sharded(oracle)
            plain = cls(oracle.values(), **options)
            ours = make(model, cls, options)
            for step in range(STEPS):
                set_grads(step, oracle, model)
                plain.step()
                ours.step()
            # torch's fused CPU kernels round the last elements of a tensor, those that fill no vector, otherwise.
            close = {"rtol": 1e-5, "atol": 1e-6} if options.get("fused") else {}
            assert_equal(model, oracle, (name, options), **close)
            for key, param in oracle.items():
                for slot, value in plain.state[param].items():
                    if isinstance(value, torch.Tensor):
                        same(ours.state[model[key]][slot], value, f"{name} {options} {key} {slot}", **close)


def test_every_elementwise_class_is_tried():
    assert {cls.__name__ for cls in ELEMENTWISE} == set(OPTIONS)


def sharded_optimizer():
    with st.strict():
        parity(lambda model, cls, options: st.ShardedOptimizer(model, cls, **options))


@every_size
def test_sharded_optimizer(world, size):
    world(sharded_optimizer, size)


def stock_optimizer():
    with st.strict():
        parity(lambda model, cls, options: cls(list(model.values()), **options))


@pytest.mark.parametrize("size", [1, 3])
def test_stock_optimizer_on_sharded_parameters(world, size):
    world(stock_optimizer, size)


def default_implementation():
    """The automatic choice is what it is for plain tensors: foreach where the device has it, no loop over wrappers."""
    from torch.optim.optimizer import _default_to_fused_or_foreach
    from torch.utils._foreach_utils import _has_foreach_support

    model = sharded(dense())
    wrappers = [x for x in model.values() if isinstance(x, st.ShardedTensor)]
    assert _has_foreach_support(wrappers, device())
    for fused in (True, False):
        plain = _default_to_fused_or_foreach(list(dense().values()), False, use_fused=fused)
        assert _default_to_fused_or_foreach(list(model.values()), False, use_fused=fused) == plain


def test_the_default_implementation_is_that_of_plain_tensors(world):
    world(default_implementation, 2)


def options_of_every_kind():
    lr = torch.tensor(0.1)
    oracle = dense()
    model = sharded(oracle)
    plain = torch.optim.Adam(oracle.values(), lr=torch.tensor(0.1), foreach=False)
    ours = st.ShardedOptimizer(model, torch.optim.Adam, lr=lr, foreach=False)
    for step in range(STEPS):
        set_grads(step, oracle, model)
        plain.step()
        ours.step()
        lr.mul_(0.5)  # in place, as capturable schedulers do
        plain.param_groups[0]["lr"].mul_(0.5)
        ours.param_groups[0]["betas"] = plain.param_groups[0]["betas"] = (0.8, 0.9)
    assert_equal(model, oracle)


def test_hyperparameters_changed_in_place_or_replaced_hold_from_the_next_step(world):
    world(options_of_every_kind, 2)


def missing_gradients():
    oracle = dense()
    model = sharded(oracle)
    oracle["rows"].requires_grad_(False)
    model["rows"].requires_grad_(False)
    plain = torch.optim.AdamW(oracle.values())
    ours = st.ShardedOptimizer(model, torch.optim.AdamW)
    names = [name for name in oracle if name not in ("rows", "flat", "plain")]
    set_grads(0, {name: oracle[name] for name in names}, {name: model[name] for name in names})
    plain.step()
    ours.step()
    assert_equal(model, oracle)
    assert sorted(ours.state_dict()["state"]) == sorted(names)
    assert len(ours.state) == len(names)


def test_parameters_without_a_gradient_are_left_alone(world):
    world(missing_gradients, 3)


def differentiable():
    w = torch.arange(6.0, device=device()).requires_grad_()
    x = st.distribute(w, "[tp]") * 1
    ours = st.ShardedOptimizer({"x": x}, torch.optim.SGD, lr=w.sum() * 0 + 0.5, differentiable=True, foreach=False)
    x._local.grad = torch.ones_like(x._local)
    ours.step()
    (whole(x) * w.detach()).sum().backward()
    assert torch.equal(w.grad, w.detach())


def test_differentiable(world):
    world(differentiable, 2)
