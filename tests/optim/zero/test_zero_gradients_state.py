"""Copies of an optimizer that reduces gradients, groups that are added later, and state dicts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim
from zero_models import (
    AVERAGED,
    PARTITIONS,
    ROUNDED,
    SHAPES,
    assert_averaged,
    assert_equal,
    assert_loads,
    assert_value,
    backward,
    groups_of,
    reducing,
    train_both,
    twins,
    zero,
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


def storages(params, optimizer):
    tensors = [param.detach() for param in params.values()]
    for state in optimizer.optim.state.values():
        tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
    return {x.untyped_storage().data_ptr() for x in tensors if x.numel()}


def copied(mode):
    """A copy of model and optimizer goes on as the original does, and by itself."""
    model, ours, oracle, plain = adam_pair(mode)
    train_both(model, ours, oracle, plain, [0])
    other, its = copy.deepcopy((model, ours))
    another, its_plain = copy.deepcopy((oracle, plain))
    assert not storages(model, ours) & storages(other, its)
    before = {name: param.detach().clone() for name, param in model.items()}
    train_both(other, its, another, its_plain, [1, 2])
    assert_equal(model, before)
    assert all(param.grad is None for param in model.values())
    train_both(model, ours, oracle, plain, [1, 2])
    assert_equal(other, model, **ROUNDED)
    train_both(other, its, another, its_plain, [3])


@both
@every_mode
def test_a_deep_copy_trains_on_by_itself(world, mode):
    world(copied, 3, mode=mode)


def copied_between(mode):
    """A copy made between backward and step: of the original, nothing is lost."""
    model, ours, oracle, plain = adam_pair(mode)
    backward(model, oracle, 0)
    other, its = copy.deepcopy((model, ours))
    another, its_plain = copy.deepcopy((oracle, plain))
    assert_averaged(model, oracle)
    assert_averaged(other, another)
    for params, optimizer, reference, plain_ in ((model, ours, oracle, plain), (other, its, another, its_plain)):
        optimizer.step()
        plain_.step()
        assert_equal(params, reference, **AVERAGED)


@sim
@every_mode
def test_a_deep_copy_between_backward_and_step(world, mode):
    world(copied_between, 2, mode=mode)


def grown(mode, when):
    """A group that is added later is reduced, too; also between backward and step, or when gradients add up."""
    model, oracle = twins()
    first, later = list(SHAPES)[:5], list(SHAPES)[5:]
    options = {"lr": 0.02, "eps": 1e-3}
    ours = reducing([model[name] for name in first], optim.AdamW, mode, **options)
    plain = optim.AdamW([oracle[name] for name in first], **options)
    for step in range(2):
        backward(model, oracle, step, first)
        assert_averaged({n: model[n] for n in first}, {n: oracle[n] for n in first})
        if when == "before the step" and step:
            break
        ours.step()
        plain.step()
        if when == "after zero_grad" or not step:
            ours.zero_grad()
            plain.zero_grad()
    for optimizer, params in ((ours, model), (plain, oracle)):
        optimizer.add_param_group({"params": (params[name] for name in later), "lr": 0.05})
    if when == "before the step":
        ours.step()
        plain.step()
        assert_equal(model, oracle, when, **AVERAGED)
    train_both(model, ours, oracle, plain, range(2, 4))


@sim
@every_mode
@pytest.mark.parametrize("when", ["after zero_grad", "before the step", "gradients add up"])
def test_groups_added_later(world, mode, when):
    world(grown, 3, mode=mode, when=when)


KINDS = ("plain", "zero", "reducing")


def round_trip(kind, mode):
    """State goes by name into another optimizer, which takes a step, and back."""
    model, ours, oracle, plain = adam_pair(mode)
    train_both(model, ours, oracle, plain, [0, 1])
    module, dense = nn.ParameterDict(model), nn.ParameterDict(oracle)
    state, expected = st.optim_state_dict(module, ours, full=True), st.optim_state_dict(dense, plain)
    assert_value(state, expected, "full", **AVERAGED)
    state = st.optim_state_dict(module, ours)
    other = {name: nn.Parameter(param.detach().clone()) for name, param in model.items()}
    make = {"plain": lambda groups, cls, **kw: cls(groups, **kw), "zero": zero, "reducing": reducing}[kind]
    its, its_module = make(groups_of(other), optim.AdamW, lr=0.7), nn.ParameterDict(other)
    assert_loads(state, lambda s: its.load_state_dict(st.optim_state_dict_to_load(its_module, its, s)))
    backward(model, oracle, 2)
    for name, param in oracle.items():
        other[name].grad = param.grad.clone()
    for optimizer in (ours, its, plain):
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, oracle, **AVERAGED)
    assert_equal(other, oracle, **AVERAGED)
    state = st.optim_state_dict(its_module, its)
    last = {name: nn.Parameter(param.detach().clone()) for name, param in other.items()}
    back, module = reducing(groups_of(last), optim.AdamW, mode, lr=0.9), nn.ParameterDict(last)
    assert_loads(state, lambda s: back.load_state_dict(st.optim_state_dict_to_load(module, back, s)))
    train_both(last, back, oracle, plain, [3])


@sim
@every_mode
@pytest.mark.parametrize("kind", KINDS)
def test_state_by_name(world, kind, mode):
    world(round_trip, 3, kind=kind, mode=mode)


def consolidated(mode):
    model, ours, oracle, plain = adam_pair(mode)
    train_both(model, ours, oracle, plain, [0, 1])
    ours.consolidate_state_dict(to=1)
    if as_group().rank == 1:
        assert_value(ours.state_dict(), plain.state_dict(), **AVERAGED)
    ours.load_state_dict(plain.state_dict())
    train_both(model, ours, oracle, plain, [2])


@both
@every_mode
def test_consolidated_state(world, mode):
    world(consolidated, 3, mode=mode)
