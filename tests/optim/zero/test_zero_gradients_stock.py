"""What works with a torch optimizer works with one that reduces gradients: clipping, GradScaler, schedulers."""

from __future__ import annotations

import pytest
import torch
from harness import device
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR
from zero_models import (
    AVERAGED,
    PARTITIONS,
    SHAPES,
    assert_averaged,
    assert_equal,
    backward,
    groups_of,
    reducing,
    train_both,
    twins,
)

import shardtensor as st
from shardtensor.comm.process_group import as_group

sim = pytest.mark.worlds("sim")
both = pytest.mark.worlds("sim", "gloo")
every_mode = pytest.mark.parametrize("mode", PARTITIONS)


def adam_pair(mode, **options):
    model, oracle = twins()
    options = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3, **options}
    ours, plain = reducing(groups_of(model), optim.AdamW, mode, **options), optim.AdamW(groups_of(oracle), **options)
    return model, ours, oracle, plain


# -- clipping


CLIPS = {
    "torch norm": nn.utils.clip_grad_norm_,
    "st norm": st.clip_grad_norm_,
    "torch value": nn.utils.clip_grad_value_,
    "st value": st.clip_grad_value_,
}


def clipped(how, mode, options):
    """One parameter has no gradient in the middle step, and torch has no infinity norm of an empty one."""
    model, ours, oracle, plain = adam_pair(mode)
    skipped = ("cube", "empty") if options else ("cube",)
    limit = 0.05 if "norm" in how else 0.01
    reference = nn.utils.clip_grad_norm_ if "norm" in how else nn.utils.clip_grad_value_
    for step in range(3):
        backward(model, oracle, step, [name for name in SHAPES if name not in skipped[step != 1 :]])
        got = CLIPS[how](list(model.values()), limit, **options)
        want = reference(list(oracle.values()), limit, **options)
        if want is not None:
            assert not isinstance(got, st.ShardedTensor)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
            assert want > limit
        assert_averaged(model, oracle, (how, step))
        ours.step()
        plain.step()
        assert_equal(model, oracle, (how, step), **AVERAGED)
        ours.zero_grad()
        plain.zero_grad()


@both
@every_mode
@pytest.mark.parametrize("how", CLIPS)
def test_clipping(world, how, mode):
    world(clipped, 3, how=how, mode=mode, options={})


@sim
@every_mode
@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms(world, mode, norm_type):
    world(clipped, 4, how="torch norm", mode=mode, options={"norm_type": norm_type})
    world(clipped, 4, how="st norm", mode=mode, options={"norm_type": norm_type, "foreach": False})


# -- mixed precision


def scaled(mode, unscales):
    """An element of one gradient overflows on one rank, so it is stepped by one rank: all ranks skip the step."""
    model, ours, oracle, plain = adam_pair(mode)
    overflows = [False]
    last = as_group().rank == as_group().size - 1
    at = torch.tensor([7], device=device())
    model["bias"].register_hook(lambda g: g.index_fill(0, at, float("inf")) if overflows[0] and last else g)
    oracle["bias"].register_hook(lambda g: g.index_fill(0, at, float("inf")) if overflows[0] else g)
    scalers = [torch.amp.GradScaler(device().type, init_scale=4.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        overflows[0] = step in (1, 4)
        for scaler in scalers:
            scaler.scale(torch.ones((), device=device()))  # as for a loss: makes the scale
        backward(model, oracle, step, scale=scalers[0].get_scale())
        for scaler, optimizer, params in zip(scalers, (ours, plain), (model, oracle), strict=True):
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(list(params.values()), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_equal(model, oracle, step, **AVERAGED)
    assert scalers[0].get_scale() == 2.0


@both
@every_mode
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscale_"])
def test_grad_scaler(world, mode, unscales):
    world(scaled, 3, mode=mode, unscales=unscales)


def scheduled(mode):
    model, ours, oracle, plain = adam_pair(mode)
    schedulers = [OneCycleLR(optimizer, max_lr=0.1, total_steps=6) for optimizer in (ours, plain)]
    for step in range(4):
        train_both(model, ours, oracle, plain, [step])
        for scheduler in schedulers:
            scheduler.step()
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in plain.param_groups]


@sim
@every_mode
def test_schedulers(world, mode):
    world(scheduled, 3, mode=mode)
