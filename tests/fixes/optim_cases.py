"""Errors of optimizers and their states."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import shardtensor as st
from fixes.case import Case, linear, mlp, step, weight


def adam(model: nn.Module | None = None, **options: Any) -> st.ShardedOptimizer:
    return st.ShardedOptimizer(linear() if model is None else model, torch.optim.Adam, **{"lr": 0.1, **options})


def trained(model: nn.Module | None = None) -> st.ShardedOptimizer:
    model = linear() if model is None else model
    step(model, 6)
    optimizer = adam(model)
    optimizer.step()
    return optimizer


def renamed(state: Any, old: str, new: str) -> Any:
    rename = {old: new}
    state = copy.deepcopy(state)
    state["state"] = {rename.get(key, key): value for key, value in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [rename.get(key, key) for key in group["params"]]
    return state


def groups(*rates: float) -> list[dict[str, Any]]:
    model = linear()
    pairs = list(model.named_parameters())
    if len(rates) == 1:
        return [{"params": pairs, "lr": rates[0]}]
    return [{"params": [pair], "lr": rate} for pair, rate in zip(pairs, rates, strict=True)]


CASES: dict[str, Case] = {
    "two parameters of one name": Case(
        lambda: st.ShardedOptimizer([("w", nn.Parameter(weight())), ("w", nn.Parameter(weight()))], torch.optim.SGD),
        {
            "give each its own name": lambda: st.ShardedOptimizer(
                [("v", nn.Parameter(weight())), ("w", nn.Parameter(weight()))], torch.optim.SGD
            )
        },
    ),
    "a result": Case(
        lambda: st.ShardedOptimizer({"w": nn.Parameter(weight()) * 2}, torch.optim.SGD),
        {
            "detach() it first": lambda: st.ShardedOptimizer(
                {"w": (nn.Parameter(weight()) * 2).detach().requires_grad_()}, torch.optim.SGD
            )
        },
    ),
    "parameters that the model lacks": Case(
        lambda: st.optim_state_dict(mlp(), adam()),
        {
            "pass the model whose parameters() the optimizer was made with": lambda: st.optim_state_dict(
                (m := linear()), adam(m)
            )
        },
    ),
    "state of other parameters": Case(
        lambda: adam().load_state_dict(renamed(trained().state_dict(), "0.weight", "first.weight")),
        {
            "rename its keys, or leave these parameters out on both sides": lambda: adam().load_state_dict(
                renamed(renamed(trained().state_dict(), "0.weight", "first.weight"), "first.weight", "0.weight")
            )
        },
    ),
    "other hyperparameters in one group": Case(
        lambda: adam(groups(0.1)).load_state_dict(adam(groups(0.1, 0.2)).state_dict()),
        {
            "make the groups as they were when it was saved": lambda: adam(groups(0.3, 0.4)).load_state_dict(
                adam(groups(0.1, 0.2)).state_dict()
            )
        },
    ),
    "state of another shape": Case(
        lambda: adam().load_state_dict(trained(nn.Sequential(nn.Linear(6, 8))).state_dict()),
        {
            "load a state dict of this model; whole tensors have the global shape": lambda: adam().load_state_dict(
                trained(nn.Sequential(nn.Linear(6, 4))).state_dict()
            )
        },
    ),
    "numbers of other groups": Case(
        lambda: adam().load_state_dict(torch.optim.Adam(mlp().parameters()).state_dict()),
        {
            "save it from an optimizer made with named_parameters()": lambda: adam().load_state_dict(
                torch.optim.Adam(nn.Sequential(nn.Linear(6, 4)).named_parameters()).state_dict()
            )
        },
    ),
    "parameters that were replaced": Case(
        lambda: [
            (model := linear()),
            (optimizer := adam(model)),
            setattr(model[0], "weight", nn.Parameter(weight())),
            optimizer.step(),
        ],
        {
            "make a new ShardedOptimizer for them and load the old one's state_dict() into it": lambda: [
                (model := linear()),
                (old := trained(model)),
                setattr(model[0], "weight", nn.Parameter(weight())),
                (new := adam(model)).load_state_dict(old.state_dict()),
                new.step(),
            ]
        },
    ),
}
