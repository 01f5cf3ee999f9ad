"""Cases of users of torch's ZeroRedundancyOptimizer, by their numbers in the list of cases."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import SIZES, device
from torch import nn, optim
from torch.optim.lr_scheduler import ReduceLROnPlateau
from zero_models import MODES, ROUNDED, assert_value, zero

import shardtensor as st
from shardtensor.comm.process_group import as_group

pytestmark = pytest.mark.worlds("sim")


def param(value, size=3):
    return nn.Parameter(torch.full((size,), float(value), device=device()))


def interleaved_groups(mode):
    options = {"lr": 0.01}
    ours, theirs = ([param(i + 1) for i in range(4)] for _ in range(2))

    def groups(p):
        return [{"params": [p[0], p[2]], "weight_decay": 0.1}, {"params": [p[1], p[3]], "lr": 0.5}]

    optimizer, plain = zero(groups(ours), optim.AdamW, mode, **options), optim.AdamW(groups(theirs), **options)

    def step(optimizer, params):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, i + 1.0)
        optimizer.step()

    step(optimizer, ours)
    step(plain, theirs)
    close = ROUNDED if mode == "ranges" else {}
    assert_value(ours, theirs, **close)
    optimizer.consolidate_state_dict(to=0)
    if as_group().rank:
        with pytest.raises(RuntimeError, match="has not been consolidated on this rank"):
            optimizer.state_dict()
        return
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [0, 1, 2, 3]
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    assert_value(state, plain.state_dict(), **close)
    loaded = optim.AdamW(groups(ours), lr=7.0)
    loaded.load_state_dict(state)
    step(loaded, ours)
    step(plain, theirs)
    assert_value(ours, theirs, **close)


@pytest.mark.parametrize("mode", MODES)
def test_b21_parameter_groups_interleaved(world, mode):
    world(interleaved_groups, 3, mode=mode)


def matrices():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2, device=device())) for _ in range(5)]


def seeded(params):
    generator = torch.Generator().manual_seed(1)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def save_on_three(mode, fused):
    params = matrices()
    optimizer = zero(params, optim.AdamW, mode, lr=0.1, fused=fused)
    seeded(params)
    optimizer.step()
    optimizer.consolidate_state_dict()
    is_first = as_group().rank == 0
    return (optimizer.state_dict(), [p.detach() for p in params]) if is_first else None


def resume(state, values, mode, fused):
    ours = [nn.Parameter(value.clone()) for value in values]
    optimizer = zero(ours, optim.AdamW, mode, lr=0.1)
    optimizer.load_state_dict(state)
    for held in optimizer.optim.state.values():
        assert held["step"].device == (device() if fused else torch.device("cpu"))
    for p in ours:
        p.grad = torch.ones_like(p)
    optimizer.step()
    theirs = matrices()
    plain = optim.AdamW(theirs, lr=0.1, fused=fused)
    seeded(theirs)
    plain.step()
    for p in theirs:
        p.grad = torch.ones_like(p)
    plain.step()
    assert_value(ours, theirs, **ROUNDED)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_b22_saved_on_three_ranks_and_resumed_on_others(world, mode, fused):
    state, values = world(save_on_three, 3, mode=mode, fused=fused)[0]
    for size in SIZES:
        world(resume, size, state=state, values=values, mode=mode, fused=fused)


def empty_group(mode):
    model = nn.Linear(2, 2).to(device())
    options = {"lr": 0.1}

    def step(optimizer):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    optimizer = zero([{"params": list(model.parameters())}, {"params": []}], optim.AdamW, mode, **options)
    step(optimizer)
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if as_group().rank == 0 else None
    state = as_group().exchange_objects(state)[0]
    fresh = zero([{"params": list(model.parameters())}, {"params": []}], optim.AdamW, mode, lr=5.0)
    fresh.load_state_dict(state)
    for group in (*fresh.param_groups, *fresh.optim.param_groups):
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.9, 0.999), 1e-8, 0.01)
    twin = copy.deepcopy(model)
    plain = optim.AdamW([{"params": list(twin.parameters())}, {"params": []}], **options)
    plain.load_state_dict(state)
    for p in twin.parameters():
        p.grad = torch.ones_like(p)
    step(fresh)
    plain.step()
    assert_value(list(model.parameters()), list(twin.parameters()), **ROUNDED)

    # groups listed in another order, with learning rates of their own, are matched by the names in the model
    def groups(*names, **lr):
        return [{"params": [getattr(model, name)], **({"lr": lr[name]} if name in lr else {})} for name in names]

    first = zero(groups("weight", "bias", weight=0.3, bias=0.7), optim.AdamW, mode, lr=0.1)
    step(first)
    second = zero(groups("bias", "weight"), optim.AdamW, mode, lr=0.1)
    named = st.optim_state_dict(model, first)
    second.load_state_dict(st.optim_state_dict_to_load(model, second, named))
    assert [group["lr"] for group in second.param_groups] == [0.7, 0.3]
    assert_value(st.optim_state_dict(model, second)["state"], named["state"])


@pytest.mark.parametrize("mode", MODES)
def test_b23_an_empty_group_keeps_its_hyperparameters(world, mode):
    world(empty_group, 2, mode=mode)


def made(mode, is_named):
    p0, p1 = param(1, 2), param(1, 2)
    first, second = ([("p0", p0)], [("p1", p1)]) if is_named else ([p0], [p1])
    optimizer = zero(first, optim.SGD, mode, lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    optimizer.add_param_group({"params": second, "lr": 1.0})
    return [p0, p1], optimizer, scheduler


def scheduled(mode, is_named):
    params, optimizer, scheduler = made(mode, is_named)
    for loss in (1, 2, 3):
        scheduler.step(loss)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.001, 0.01])
    assert_value(params, [param(0.999, 2), param(0.99, 2)], **ROUNDED)
    optimizer.consolidate_state_dict()
    is_first = as_group().rank == 0
    return scheduler.state_dict(), optimizer.state_dict() if is_first else None


def restored(mode, is_named, of_scheduler, of_optimizer):
    params, optimizer, scheduler = made(mode, is_named)
    optimizer.load_state_dict(of_optimizer)
    scheduler.load_state_dict(of_scheduler)
    lrs = [group["lr"] for group in optimizer.param_groups]
    assert lrs == scheduler._last_lr == pytest.approx([0.001, 0.01])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert_value(params, [param(0.999, 2), param(0.99, 2)], **ROUNDED)


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_b25_scheduler_and_a_group_added_later_restored(world, mode, is_named):
    of_scheduler, of_optimizer = world(scheduled, 2, mode=mode, is_named=is_named)[0]
    world(restored, 2, mode=mode, is_named=is_named, of_scheduler=of_scheduler, of_optimizer=of_optimizer)
