"""Consolidated state is the plain optimizer's state dict, and any state dict loads on any number of ranks."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from harness import FULL, SIZES, device
from torch import optim
from zero_models import (
    MATRICES,
    MODES,
    OPTIONS,
    ROUNDED,
    Factored,
    assert_equal,
    assert_loads,
    assert_value,
    groups_of,
    in_turns,
    names_for,
    quadratic,
    set_grads,
    twins,
    zero,
)

from shardtensor.comm.process_group import as_group

pytestmark = pytest.mark.worlds("sim")

ELEMENTWISE = [name for name in OPTIONS if name not in ("Adafactor", "Muon", "LBFGS")]


def class_of(name):
    return Factored if name == "Factored" else getattr(optim, name)


def options_of(name):
    return {"lr": 0.05, **(OPTIONS[name][-1] if name in OPTIONS else {})}


def params_of(name):
    """Without an empty one: it has a test of its own. torch's fused kernels need state with a parameter's strides."""
    if name in ("Factored", "Muon"):
        return list(MATRICES)
    return [key for key in names_for(name) if key != "empty" and (name, key) != ("AdamW", "strided")]


def take_steps(name, steps, *pairs):
    for step in steps:
        for optimizer, params in pairs:
            if name == "LBFGS":
                optimizer.step(quadratic(params))
            else:
                set_grads(step, params, skipped=("bias",))
                optimizer.step()


def pair(name, mode):
    model, oracle = twins(params_of(name))
    cls, options = class_of(name), options_of(name)
    ours = zero(groups_of(model, name), cls, mode, **options)
    return ours, model, cls(groups_of(oracle, name), **options), oracle


def closeness(name, mode):
    is_flat = mode == "ranges" or (mode == "views" and (name not in ELEMENTWISE or name == "AdamW"))
    return ROUNDED if is_flat and name != "LBFGS" else {}


def consolidated(name, mode):
    """The rank that is asked gets the plain optimizer's dict, a plain optimizer continues with it."""
    ours, model, plain, oracle = pair(name, mode)
    take_steps(name, range(2), (ours, model), (plain, oracle))
    group = as_group()
    to = group.size - 1
    ours.consolidate_state_dict(to=to)
    if group.rank != to:
        with pytest.raises(RuntimeError, match=f"consolidate_state_dict\\(to={group.rank}\\)"):
            ours.state_dict()
        return
    state = ours.state_dict()
    close = closeness(name, mode)
    assert_value(state, plain.state_dict(), f"{name} {mode}", **close)
    assert list(state) == ["state", "param_groups"]
    tensors = [x for values in state["state"].values() for x in values.values() if isinstance(x, torch.Tensor)]
    assert all(x.device.type == "cpu" for x in tensors)
    fresh, copy_of = twins(params_of(name))
    for key, param in oracle.items():
        fresh[key].data.copy_(param)
        copy_of[key].data.copy_(param)
    continued = class_of(name)(groups_of(fresh, name), lr=9.0)
    continued.load_state_dict(state)
    take_steps(name, [2], (continued, fresh), (plain, oracle))
    assert_equal(fresh, oracle, (name, mode), **close)


@pytest.mark.parametrize(("case", "ranks"), in_turns(product([*OPTIONS, "Factored"], MODES), (3, 2, 4, 1)))
def test_consolidated_state_is_that_of_the_plain_optimizer(world, case, ranks):
    name, mode = case
    world(consolidated, ranks, name=name, mode=mode)


def loaded(name, mode, state, values):
    """State of any origin is continued as the plain optimizer would."""
    ours, model, plain, oracle = pair(name, mode)
    for params in (model, oracle):
        for key, value in values.items():
            params[key].data.copy_(value)
    assert_loads(state, ours.load_state_dict)
    plain.load_state_dict(copy.deepcopy(state))  # it keeps the tensors
    take_steps(name, range(2, 4), (ours, model), (plain, oracle))
    assert_equal(model, oracle, (name, mode), **closeness(name, mode))
    ours.consolidate_state_dict()
    if as_group().rank == 0:
        assert_value(ours.state_dict(), plain.state_dict(), f"{name} {mode}", **closeness(name, mode))


def empty_param(mode):
    model, oracle = twins(["empty", "bias"])
    ours, plain = zero(model, optim.Adam, mode, lr=0.1), optim.Adam(oracle.values(), lr=0.1)
    take_steps("Adam", range(2), (ours, model), (plain, oracle))
    ours.consolidate_state_dict()
    if as_group().rank == 0:
        assert_value(ours.state_dict(), plain.state_dict(), mode, **closeness("Adam", mode))
    assert_loads(plain.state_dict(), ours.load_state_dict)
    ours.consolidate_state_dict()
    if as_group().rank == 0:
        assert_value(ours.state_dict(), plain.state_dict(), mode, **closeness("Adam", mode))


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_parameter_has_state_as_in_the_plain_optimizer(world, mode):
    world(empty_param, 2, mode=mode)


@pytest.mark.parametrize(("case", "ranks"), in_turns(product([*OPTIONS, "Factored"], MODES), (2, 3, 4, 1)))
def test_the_state_of_a_plain_optimizer_loads(world, case, ranks):
    name, mode = case
    _, oracle = twins(params_of(name))
    plain = class_of(name)(groups_of(oracle, name), **options_of(name))
    take_steps(name, range(2), (plain, oracle))
    values = {key: param.detach() for key, param in oracle.items()}
    world(loaded, ranks, name=name, mode=mode, state=plain.state_dict(), values=values)


def saved(name, mode):
    ours, model, *_ = pair(name, mode)
    take_steps(name, range(2), (ours, model))
    ours.consolidate_state_dict()
    if as_group().rank:
        return None
    return ours.state_dict(), {key: param.detach().clone() for key, param in model.items()}


SOME_WORLDS = list(product(SIZES, SIZES)) if FULL else [(3, 2), (2, 4), (4, 3), (1, 4), (4, 1)]


@pytest.mark.parametrize(("wrote", "reads"), SOME_WORLDS)
@pytest.mark.parametrize("name", ["Adam", "Adafactor", "Factored"])
def test_state_saved_on_some_ranks_loads_on_others(world, wrote, reads, name):
    for mode, other in zip(MODES, ["ranges", "ranges", "owners"], strict=True):
        state, values = world(saved, wrote, name=name, mode=mode)[0]
        world(loaded, reads, name=name, mode=other, state=state, values=values)


def counters(mode, fused, state):
    """Step counters are where the options in the loaded groups need them."""
    _, oracle = twins()
    ours = zero(oracle, optim.Adam, mode, lr=0.1)
    assert_loads(state, ours.load_state_dict)
    set_grads(1, oracle)
    ours.step()
    steps = [values["step"] for values in ours.optim.state.values()]
    assert all(step.device == (device() if fused else torch.device("cpu")) for step in steps)
    assert all(step.dtype == torch.float32 and step.item() == 2 for step in steps)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_step_counters_are_on_the_device_that_the_kernel_needs(world, mode, fused):
    _, oracle = twins()
    plain = optim.Adam(oracle.values(), lr=0.1, fused=fused)
    set_grads(0, oracle)
    plain.step()
    world(counters, 3, mode=mode, fused=fused, state=plain.state_dict())


def as_of_the_call(mode):
    """A consolidated dict keeps the values of the call; a step or a load drops it."""
    ours, model, plain, oracle = pair("Adam", mode)
    take_steps("Adam", [0], (ours, model), (plain, oracle))
    ours.consolidate_state_dict()
    state = as_group().exchange_objects(ours.state_dict() if as_group().rank == 0 else None)[0]
    take_steps("Adam", [1], (ours, model))
    assert_value(state["state"], plain.state_dict()["state"], **closeness("Adam", mode))
    with pytest.raises(RuntimeError, match="has not been consolidated"):
        ours.state_dict()
    ours.consolidate_state_dict()
    ours.load_state_dict(state)
    with pytest.raises(RuntimeError, match="has not been consolidated"):
        ours.state_dict()


@pytest.mark.parametrize("mode", MODES)
def test_a_consolidated_state_dict_is_as_of_the_call(world, mode):
    world(as_of_the_call, 2, mode=mode)


def hooks_of_loading():
    ours, model, plain, oracle = pair("Adam", "owners")
    take_steps("Adam", [0], (ours, model), (plain, oracle))
    called = []
    ours.register_load_state_dict_pre_hook(lambda optimizer, state: called.append(optimizer))
    ours.register_load_state_dict_post_hook(lambda optimizer: called.append(optimizer))
    ours.load_state_dict(plain.state_dict())
    assert called == [ours, ours]
    ours.register_state_dict_post_hook(lambda optimizer, state: {**state, "version": 3})
    ours.consolidate_state_dict()
    if as_group().rank == 0:
        assert ours.state_dict()["version"] == 3


def test_hooks_of_state_dicts_run(world):
    world(hooks_of_loading, 2)


def hyperparameters_loaded(mode):
    """Keys that the class added to groups, and options, come from the loaded dict."""
    ours, model, plain, oracle = pair("Adam", mode)
    plain.param_groups[0].update(lr=0.5, initial_lr=0.7)
    ours.load_state_dict(plain.state_dict())
    take_steps("Adam", [0], (ours, model), (plain, oracle))
    assert_equal(model, oracle, **closeness("Adam", mode))
    for mine, other in zip(ours.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}


@pytest.mark.parametrize("mode", MODES)
def test_hyperparameters_are_loaded(world, mode):
    world(hyperparameters_loaded, 2, mode=mode)
