"""The state of optimizers of every class, under any layout; and what another class takes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from trained import Matrices, assert_same, map_whole, train, values, whole

import shardtensor as st

pytestmark = [pytest.mark.worlds("sim"), pytest.mark.filterwarnings("ignore::shardtensor.GatherWarning")]
ROUNDED = {"rtol": 1e-9, "atol": 1e-9}

CLASSES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"foreach": True},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "ASGD": {"t0": 1.0},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {},
    "LBFGS": {"max_iter": 3, "history_size": 2},
}
"""Every class of torch.optim with state for dense gradients."""
SINGLE = ("NAdam", "ASGD")
"""Their numbers are of torch's default dtype, and torch's ``load_state_dict`` converts them to that of parameters."""


def matrices(cls: str, seed: int) -> nn.Module:
    return Matrices(seed).float() if cls in SINGLE else Matrices(seed)


def plain(cls: str, seed: int) -> tuple[nn.Module, Any]:
    model = matrices(cls, seed)
    return model, getattr(optim, cls)(model.parameters(), lr=0.05, **CLASSES[cls])


def sharded(rules: dict[str, str], ours: bool) -> Callable[[str, int], tuple[nn.Module, Any]]:
    def make(cls: str, seed: int) -> tuple[nn.Module, Any]:
        model = st.shard_module(matrices(cls, seed), rules)
        options = {"lr": 0.05, **CLASSES[cls]}
        inner = getattr(optim, cls)
        return model, st.ShardedOptimizer(model, inner, **options) if ours else inner(model.parameters(), **options)

    return make


def zero(**options: Any) -> Callable[[str, int], tuple[nn.Module, Any]]:
    def make(cls: str, seed: int) -> tuple[nn.Module, Any]:
        model = matrices(cls, seed)
        inner = getattr(optim, cls)
        return model, st.ZeroRedundancyOptimizer(model.parameters(), inner, lr=0.05, **options, **CLASSES[cls])

    return make


WAYS: dict[str, Callable[[str, int], tuple[nn.Module, Any]]] = {
    "plain": plain,
    "our rows": sharded({"*": "[tp balanced, -]"}, ours=True),
    "our columns": sharded({"*": "[-, tp balanced]"}, ours=True),
    "torch's class on rows": sharded({"up": "[tp balanced, -]"}, ours=False),
    "ZeRO": zero(),
    "ZeRO ranges": zero(partition="ranges"),
}
CLOSE = {"Muon": {"rtol": 0, "atol": 1e-2}, **{cls: {"rtol": 1e-4, "atol": 1e-5} for cls in SINGLE}}
"""Muon computes in bfloat16."""
TOGETHER = {"LBFGS": ["plain"], "Muon": ["plain", "our rows", "ZeRO"], "Adafactor": ["plain", "our rows", "ZeRO"]}
"""How the classes that are not elementwise can be run."""


def save_after(path: str, way: str, cls: str, layout: str) -> list[dict[str, Any]]:
    """What is saved, and what the run has two steps later."""
    model, optimizer = WAYS[way](cls, 0)
    train(model, optimizer, range(3))
    st.save(path, model=model, optimizer=optimizer, layout=layout)
    before = values(model, optimizer)
    train(model, optimizer, range(3, 5))
    return [before, values(model, optimizer)]


def go_on(path: str, way: str, cls: str, want: list[dict[str, Any]], **close: float) -> None:
    model, optimizer = WAYS[way](cls, 1)
    st.load(path, model=model, optimizer=optimizer)
    assert_same(values(model, optimizer), want[0])
    train(model, optimizer, range(3, 5))
    assert_same(values(model, optimizer), want[1], **close)


@pytest.mark.parametrize(("cls", "way"), [(cls, way) for cls in CLASSES for way in TOGETHER.get(cls, WAYS)])
def test_every_class_goes_on_as_if_it_was_never_interrupted(world, tmp_path, cls, way):
    ways = TOGETHER.get(cls, list(WAYS))
    path, place = str(tmp_path / "step-3"), ways.index(way)
    want = world(save_after, 2, path=path, way=way, cls=cls, layout=("whole", "as is")[place % 2])[0]
    world(go_on, 2, path=path, way=way, cls=cls, want=want)
    close = CLOSE.get(cls, ROUNDED)
    for other, size in ((ways[(place + 1) % len(ways)], 3), ("plain", 1)):
        world(go_on, size, path=path, way=other, cls=cls, want=want, **close)


# -- another class -----------------------------------------------------------------------------------------------------


def another_class(path: str, saved: str, here: str, way: str) -> None:
    """What both classes have is taken with strict=False; a class that needs more starts anew."""
    model, optimizer = WAYS[way](saved, 0)
    train(model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.5
    st.save(path, model=model, optimizer=optimizer)
    fresh, its = WAYS[way](here, 1)
    train(fresh, its, range(1))
    before = values(fresh, its)
    with pytest.raises(st.CheckpointError, match="another class") as caught:
        st.load(path, model=fresh, optimizer=its)
    assert saved in str(caught.value) and here in str(caught.value)
    assert_same(values(fresh, its), before)
    st.load(path, model=fresh, optimizer=its, strict=False)
    assert its.param_groups[0]["lr"] == 0.5
    assert_same(map_whole(fresh), map_whole(model))
    ours, theirs = (st.optim_state_dict(*each, full=True)["state"] for each in ((fresh, its), (model, optimizer)))
    if {saved, here} <= {"Adam", "AdamW", "RAdam"}:
        assert_state(ours, theirs, ("step", "exp_avg", "exp_avg_sq"))
    else:
        assert not ours
    train(fresh, its, range(1))


def assert_state(found: dict[str, Any], want: dict[str, Any], keys: tuple[str, ...]) -> None:
    assert set(found) == set(want)
    for name, state in found.items():
        for key in keys:
            assert torch.equal(whole(state[key]), whole(want[name][key])), (name, key)


@pytest.mark.parametrize("way", ["plain", "our rows", "ZeRO"])
@pytest.mark.parametrize(
    ("saved", "here"),
    [("Adam", "AdamW"), ("RAdam", "AdamW"), ("SGD", "AdamW"), ("AdamW", "SGD")],
)
def test_state_of_another_class_needs_strict_false(world, tmp_path, saved, here, way):
    world(another_class, 2, path=str(tmp_path / "c"), saved=saved, here=here, way=way)
