"""What works with a torch optimizer works with a partitioned one: schedulers, GradScaler, hooks, groups added later."""

from __future__ import annotations

import pytest
import torch
from harness import device
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from zero_models import (
    MODES,
    ROUNDED,
    Factored,
    WithoutClosure,
    assert_equal,
    assert_value,
    dense,
    quadratic,
    set_grads,
    twins,
    zero,
)

from shardtensor.comm.process_group import as_group

every_mode = pytest.mark.parametrize("mode", MODES)
pytestmark = pytest.mark.worlds("sim")


def close_to(mode):
    return ROUNDED if mode == "ranges" else {}


SCHEDULERS = {
    "step": lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5),
    "cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=6),  # changes betas, too
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


def scheduled(name, mode):
    model, oracle = twins()
    ours, plain = zero(model, optim.AdamW, mode, lr=0.1), optim.AdamW(oracle.values(), lr=0.1)
    of_ours, of_plain = SCHEDULERS[name](ours), SCHEDULERS[name](plain)
    for step in range(4):
        set_grads(step, model, oracle)
        for optimizer, scheduler in ((ours, of_ours), (plain, of_plain)):
            optimizer.step()
            scheduler.step(*([1.0 + step] if name == "plateau" else []))
        for group, other in zip(ours.param_groups, plain.param_groups, strict=True):
            assert (group["lr"], group["betas"]) == (other["lr"], other["betas"])
        assert_equal(model, oracle, (name, step), **close_to(mode))


@every_mode
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(world, name, mode):
    world(scheduled, 3, name=name, mode=mode)


def scaled(mode):
    """A step that overflows is skipped, the others see unscaled gradients."""
    model, oracle = twins()
    ours, plain = zero(model, optim.SGD, mode, lr=0.1), optim.SGD(oracle.values(), lr=0.1)
    scalers = [torch.amp.GradScaler(device().type, init_scale=4.0) for _ in range(2)]
    for step in range(4):
        set_grads(step, model, oracle)
        if step == 2:
            model["bias"].grad[3] = oracle["bias"].grad[3] = float("inf")
        for scaler, optimizer in zip(scalers, (ours, plain), strict=True):
            scaler.scale(torch.ones((), device=device()))
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert_equal(model, oracle, step, **close_to(mode))
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0


@every_mode
def test_grad_scaler(world, mode):
    world(scaled, 3, mode=mode)


def hooked(mode):
    model, _ = twins()
    called = []
    ours = zero(model, optim.AdamW, mode)
    ours.register_step_pre_hook(lambda optimizer, args, kwargs: called.append((optimizer, "before")))
    ours.register_step_post_hook(lambda optimizer, args, kwargs: called.append((optimizer, "after")))
    before = register_optimizer_step_post_hook(lambda o, *_: called.append((o, "global")))
    try:
        set_grads(0, model)
        ours.step()
    finally:
        before.remove()
    own = [(optimizer, when) for optimizer, when in called if optimizer in (ours, ours.optim)]
    assert own == [(ours, "before"), (ours, "after"), (ours, "global")]


@every_mode
def test_step_hooks_run_once(world, mode):
    world(hooked, 1, mode=mode)
    world(hooked, 2, mode=mode)


def custom(mode):
    """A class without a closure, with an argument of its own, which adds keys to its groups."""
    model, oracle = twins()
    ours, plain = zero(model, WithoutClosure, mode), WithoutClosure(list(oracle.values()))
    for step in range(3):
        set_grads(step, model, oracle)
        ours.step(scale=step + 1.0)
        plain.step(scale=step + 1.0)
        assert_equal(model, oracle, step)
        group, other = ours.param_groups[0], plain.param_groups[0]
        assert (group["calls"], group["last_scale"]) == (other["calls"], other["last_scale"]) == (step + 1, step + 1.0)
    ours.step()
    assert ours.param_groups[0]["last_scale"] == 1.0
    with pytest.raises(TypeError):
        ours.step(unknown=1)
    ours.consolidate_state_dict()
    if as_group().rank == 0:
        assert ours.state_dict()["param_groups"][0]["calls"] == 4


@every_mode
def test_classes_without_a_closure_and_with_keys_of_their_own(world, mode):
    world(custom, 2, mode=mode)


class WithScale(optim.SGD):
    """A class whose step takes a closure and a further argument."""

    @torch.no_grad()
    def step(self, closure=None, *, scale=1.0):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * scale)
        return loss


def closure_with_arguments(mode):
    model, oracle = twins()
    ours, plain = zero(model, WithScale, mode, lr=0.1), WithScale(oracle.values(), lr=0.1)
    for scale in (1.0, 0.5):
        assert torch.equal(ours.step(quadratic(model), scale=scale), plain.step(quadratic(oracle), scale=scale))
        assert torch.equal(ours.step(closure=quadratic(model)), plain.step(closure=quadratic(oracle)))
    assert_equal(model, oracle, mode)


@every_mode
def test_a_closure_and_further_arguments_of_step(world, mode):
    world(closure_with_arguments, 2, mode=mode)


def grown(name, mode):
    """Groups are added between steps, from a generator; Adagrad makes state in its constructor."""
    cls = {"Factored": Factored}.get(name) or getattr(optim, name)
    first, later = ("matrix", "row"), ("strided", "cube", "last")
    model, oracle = twins((*first, *later))
    ours = zero([model[name] for name in first], cls, mode, lr=0.1)
    plain = cls([oracle[name] for name in first], lr=0.1)
    set_grads(0, model, oracle)
    ours.step()
    plain.step()
    ours.add_param_group({"params": (model[name] for name in later[:2]), "lr": 0.3})
    plain.add_param_group({"params": (oracle[name] for name in later[:2]), "lr": 0.3})
    ours.add_param_group({"params": model["last"]})
    plain.add_param_group({"params": oracle["last"]})
    for group in plain.param_groups[1:] if name == "Adagrad" else []:  # torch 2.11 makes no state for later groups
        fresh = optim.Adagrad([dict(group)]).state
        plain.state.update({param: fresh[param] for param in group["params"] if param not in plain.state})
    close = ROUNDED if mode == "ranges" or (mode == "views" and name in ("Factored", "Adafactor")) else {}
    for step in range(1, 3):
        set_grads(step, model, oracle)
        ours.step()
        plain.step()
        assert_equal(model, oracle, (name, step), **close)
    ours.consolidate_state_dict()
    if as_group().rank == 0:
        assert_value(ours.state_dict(), plain.state_dict(), name, **close)


@every_mode
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Adafactor", "Factored"])
def test_groups_added_later(world, name, mode):
    world(grown, 3, name=name, mode=mode)


def zeroed(mode):
    model, _ = twins()
    ours = zero(model, optim.SGD, mode, lr=0.1)
    set_grads(0, model)
    ours.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in model.values())
    ours.zero_grad()
    assert all(param.grad is None for param in model.values())
    ours.step()  # without any gradient
    assert_equal(model, dense())


@every_mode
def test_zero_grad_and_a_step_without_gradients(world, mode):
    world(zeroed, 2, mode=mode)


def changed(mode):
    """Hyperparameters changed in groups, and a learning rate changed in place, hold from the next step."""
    model, oracle = twins()
    ours = zero(model, optim.Adam, mode, lr=torch.tensor(0.1))
    plain = optim.Adam(oracle.values(), lr=torch.tensor(0.1))
    for step in range(3):
        set_grads(step, model, oracle)
        ours.step()
        plain.step()
        for optimizer in (ours, plain):
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.param_groups[0]["betas"] = (0.8, 0.9)
        assert_equal(model, oracle, step, **ROUNDED)


@every_mode
def test_changed_hyperparameters(world, mode):
    world(changed, 2, mode=mode)


def trained(mode):
    """Autograd sees that a step changed the parameters: a graph from before it cannot run backward."""
    linear = nn.Linear(4, 4).to(device())
    ours = zero(list(linear.parameters()), optim.SGD, mode, lr=0.1)
    out = linear(linear(torch.ones(2, 4, device=device(), requires_grad=True))).sum()
    out.backward(retain_graph=True)
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@every_mode
def test_a_step_between_forward_and_backward_is_noticed_on_every_rank(world, mode):
    world(trained, 2, mode=mode)
