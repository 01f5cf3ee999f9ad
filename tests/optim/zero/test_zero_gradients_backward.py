"""Backwards that an error stops, nested ones of activation checkpoints, and backwards of a part of a graph."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from harness import device
from harness.quick import sampled
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from zero_models import (
    AVERAGED,
    PARTITIONS,
    SHAPES,
    assert_averaged,
    assert_equal,
    backward,
    batch,
    loss_of,
    part_of,
    reducing,
    train_both,
    twins,
)

import shardtensor as st

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")
every_mode = pytest.mark.parametrize("mode", PARTITIONS)


def pair(mode, cls=optim.SGD, names=tuple(SHAPES), **options):
    model, oracle = twins(names)
    options = {"lr": 0.1, **({"momentum": 0.9, "weight_decay": 0.1} if cls is optim.SGD else {}), **options}
    return model, reducing(model, cls, mode, **options), oracle, cls(oracle.values(), **options)


def step_both(model, ours, oracle, plain, why=""):
    assert_averaged(model, oracle, why)
    ours.step()
    plain.step()
    assert_equal(model, oracle, why, **AVERAGED)


class Stop(Exception):
    pass


def stopped(mode, before, by):
    """All ranks raise in the middle of a backward; when its gradients are dropped, it is as if it had not been."""
    model, ours, oracle, plain = pair(mode)
    train_both(model, ours, oracle, plain, [0])
    if before:
        backward(model, oracle, 7)

    def stop(grad):
        raise Stop

    handle = model["cube"].register_hook(stop)
    with pytest.raises(Stop):
        loss_of(model, part_of(batch(1))).backward()
    handle.remove()
    (ours if by == "optimizer" else nn.ParameterDict(model)).zero_grad()
    plain.zero_grad()
    train_both(model, ours, oracle, plain, [2, 3])


@both
@every_mode
@pytest.mark.parametrize("before", [False, True], ids=["", "after_another"])
@pytest.mark.parametrize("by", ["optimizer", "module"])
def test_a_backward_that_an_error_stopped(world, by, before, mode):
    world(stopped, 3, mode=mode, before=before, by=by)


def of_some(mode):
    """`backward(inputs=...)` computes and reduces the gradients of some parameters."""
    model, ours, oracle, plain = pair(mode)
    for step, names in enumerate((("cube", "row"), ("cube", "number"))):
        loss_of(model, part_of(batch(step))).backward(inputs=[model[name] for name in names])
        loss_of(oracle, batch(step)).backward(inputs=[oracle[name] for name in names])
        assert_averaged(model, oracle)
    step_both(model, ours, oracle, plain)


@sim
@every_mode
def test_backward_of_some_parameters(world, mode):
    world(of_some, 3, mode=mode)


class Blocks(nn.Module):
    """Blocks of which some are checkpointed; `shared` is used in two of them."""

    def __init__(self, is_shared):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4))
        if is_shared:
            self.blocks[2] = self.blocks[1]
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) / 5
        self.to(device())

    def forward(self, x, checkpointed=(), use_reentrant=False):
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=use_reentrant) if i in checkpointed else block(x)
        return x.square().mean()


def with_checkpoints(checkpointed, use_reentrant, is_shared, mode):
    module, dense = Blocks(is_shared), Blocks(is_shared)
    model, oracle = dict(module.named_parameters()), dict(dense.named_parameters())
    ours, plain = reducing(model, optim.SGD, mode, lr=0.5), optim.SGD(oracle.values(), lr=0.5)
    for step in range(3):
        x = batch(step).requires_grad_()  # reentrant checkpoints need an input that requires a gradient
        try:
            module(part_of(x), checkpointed, use_reentrant).backward()
        except st.RuleError as error:
            return str(error)
        dense(x).backward()
        step_both(model, ours, oracle, plain, step)
        ours.zero_grad()
        plain.zero_grad()
    return ""


CHECKPOINTED = {"all": (0, 1, 2, 3), "middle": (1, 2), "last": (3,), "first": (0,)}
CASES = sampled(product(CHECKPOINTED, ("apart", "shared"), PARTITIONS), 7)


@sim
@pytest.mark.parametrize(("which", "shared", "mode"), CASES)
def test_activation_checkpoints(world, which, shared, mode):
    is_shared = shared == "shared"
    kwargs = {"checkpointed": CHECKPOINTED[which], "is_shared": is_shared, "mode": mode}
    assert world(with_checkpoints, 3, use_reentrant=False, **kwargs) == [""] * 3
    found = world(with_checkpoints, 3, use_reentrant=True, **kwargs)
    if is_shared and any(found):  # a parameter that is used in several reentrant checkpoints may be refused
        assert all("use_reentrant=False" in text for text in found)
    else:
        assert found == [""] * 3
