"""State by the names of parameters: into a plain optimizer, a `ShardedOptimizer`, a fully sharded model, and back."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import device
from torch import nn, optim
from zero_models import MATRICES, MODES, ROUNDED, Factored, assert_loads, assert_value, set_grads, twins, zero

import shardtensor as st
from shardtensor.comm.process_group import as_group

pytestmark = pytest.mark.worlds("sim")
every_mode = pytest.mark.parametrize("mode", MODES)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x))) * self.scale


def net():
    generator = torch.Generator().manual_seed(3)
    model = Net()
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator))
    return model.to(device())


def groups(model):
    """Groups in which the names are not in the order of the model."""
    named = list(model.named_parameters())
    return [
        {"params": [pair for pair in named if pair[1].dim() > 1], "weight_decay": 0.5},
        {"params": [pair for pair in named if pair[1].dim() < 2]},
    ]


def unnamed(model):
    return [{**group, "params": [param for _, param in group["params"]]} for group in groups(model)]


def train(model, optimizer, steps):
    """Every rank has the same input, so that sharded and whole gradients are the dense ones."""
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(device())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def oracle(steps, lr=0.01):
    model = net()
    plain = optim.Adam(groups(model), lr=lr)
    train(model, plain, steps)
    return model, plain


def values(model):
    return {name: param.detach() for name, param in model.named_parameters()}


def whole(state):
    return {
        name: {key: x.full_tensor() if isinstance(x, st.ShardedTensor) else x for key, x in held.items()}
        for name, held in state["state"].items()
    }


KINDS = ("zero", "zero_unnamed", "plain", "sharded_optimizer", "fully_shard")


def made(kind, mode, model):
    """A model with the values of `model`, and an optimizer of a kind."""
    model = copy.deepcopy(model)
    if kind == "fully_shard":
        st.fully_shard(model)
    if kind == "zero":
        return model, zero(groups(model), optim.Adam, mode, lr=0.3)
    if kind == "zero_unnamed":
        return model, zero(unnamed(model), optim.Adam, mode, lr=0.3)
    if kind == "sharded_optimizer":
        return model, st.ShardedOptimizer(groups(model), optim.Adam, lr=0.3)
    return model, optim.Adam(unnamed(model), lr=0.3)


def round_trip(kind, mode, is_named):
    """From a partitioned optimizer by name into another kind, a step there, and back."""
    dense, plain = oracle(range(2))
    model = net()
    ours = zero(groups(model) if is_named else unnamed(model), optim.Adam, mode, lr=0.01)
    train(model, ours, range(2))
    state = st.optim_state_dict(model, ours)
    expected = st.optim_state_dict(dense, plain)
    assert_value(whole(state), expected["state"], "by name", **ROUNDED)
    assert_value(state["param_groups"], expected["param_groups"], "groups", **ROUNDED)
    assert_value(st.optim_state_dict(model, ours, full=True), expected, "full", **ROUNDED)
    other, optimizer = made(kind, mode, model)
    assert_loads(state, lambda s: optimizer.load_state_dict(st.optim_state_dict_to_load(other, optimizer, s)))
    train(other, optimizer, [2])
    train(dense, plain, [2])
    assert_value(whole({"state": {"": values(other)}})[""], values(dense), kind, **ROUNDED)
    back_state = st.optim_state_dict(other, optimizer)
    for name, param in model.named_parameters():
        param.data.copy_(values(dense)[name])
    back = zero(unnamed(model), optim.Adam, mode, lr=0.7)
    assert_loads(back_state, lambda s: back.load_state_dict(st.optim_state_dict_to_load(model, back, s)))
    train(model, back, [3])
    train(dense, plain, [3])
    assert_value(values(model), values(dense), kind, **ROUNDED)


@every_mode
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_by_name(world, kind, mode):
    world(round_trip, 3, kind=kind, mode=mode, is_named=True)
    world(round_trip, 2, kind=kind, mode=mode, is_named=False)


def named_state_dict(mode):
    """With names, state_dict needs no consolidation; it is keyed by name, and loads in groups in another order."""
    model = net()
    ours = zero(groups(model), optim.Adam, mode, lr=0.01)
    train(model, ours, range(2))
    state = ours.state_dict()
    dense, plain = oracle(range(2))
    expected = st.optim_state_dict(dense, plain)
    assert_value(whole(state), expected["state"], mode, **ROUNDED)
    assert_value(state["param_groups"], expected["param_groups"], mode, **ROUNDED)
    other = zero(groups(model)[::-1], optim.Adam, mode, lr=0.5)
    assert_loads(state, other.load_state_dict)
    train(model, other, [2])
    train(dense, plain, [2])
    assert_value(values(model), values(dense), mode, **ROUNDED)
    other.load_state_dict(expected)  # with full tensors
    assert_value(whole(other.state_dict()), expected["state"], mode)


@every_mode
def test_state_dicts_of_named_parameters(world, mode):
    world(named_state_dict, 3, mode=mode)


def consolidated_with_names(mode):
    """A consolidated dict has the numbers and the names of the plain optimizer's."""
    model = net()
    ours = zero(groups(model), optim.Adam, mode, lr=0.01)
    train(model, ours, range(2))
    ours.consolidate_state_dict()
    if as_group().rank == 0:
        _, plain = oracle(range(2))
        assert_value(ours.state_dict(), plain.state_dict(), mode, **ROUNDED)


@every_mode
def test_a_consolidated_dict_has_names(world, mode):
    world(consolidated_with_names, 3, mode=mode)


class Matrices(nn.Module):
    def __init__(self, params):
        super().__init__()
        for name in MATRICES:
            self.register_parameter(name, params[name])


def other_shapes(cls, mode):
    """State with other shapes than the parameters goes by name from one division to another."""
    model, oracle_ = twins(MATRICES)
    ours, plain = zero(model, cls, mode, lr=0.1), cls(list(oracle_.values()), lr=0.1)
    for step in range(2):
        set_grads(step, model, oracle_)
        ours.step()
        plain.step()
    state = st.optim_state_dict(Matrices(model), ours)
    assert_value(st.optim_state_dict(Matrices(model), ours, full=True)["state"], by_name(oracle_, plain), **ROUNDED)
    for other in MODES:
        copied = {name: nn.Parameter(param.detach().clone()) for name, param in model.items()}
        expected = {name: nn.Parameter(param.detach().clone()) for name, param in oracle_.items()}
        loaded, twin = zero(copied, cls, other, lr=0.7), cls(list(expected.values()), lr=0.7)
        module = Matrices(copied)
        assert_loads(state, lambda s, m=module, o=loaded: o.load_state_dict(st.optim_state_dict_to_load(m, o, s)))
        twin.load_state_dict(copy.deepcopy(plain.state_dict()))
        set_grads(2, copied, expected)
        loaded.step()
        twin.step()
        assert_value(copied, expected, f"{cls} {mode} {other}", **ROUNDED)


def by_name(params, plain):
    return {name: dict(plain.state[param]) for name, param in params.items()}


@every_mode
@pytest.mark.parametrize("cls", [optim.Adafactor, optim.Muon, Factored])
def test_state_of_other_shapes_by_name(world, cls, mode):
    world(other_shapes, 3, cls=cls, mode=mode)


def unknown_names():
    model = net()
    ours = zero(unnamed(model), optim.Adam, lr=0.01)
    train(model, ours, [0])
    state = st.optim_state_dict(model, ours)
    state["param_groups"][0]["params"] = ["other", *state["param_groups"][0]["params"][1:]]
    with pytest.raises(st.LayoutError):
        st.optim_state_dict_to_load(model, ours, state)
    with pytest.raises(st.LayoutError, match="does not have"):
        st.optim_state_dict(model.first, ours)


def test_unknown_names(world):
    world(unknown_names, 2)
