"""Errors of `reshard_module`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardtensor as st
from fixes.case import Case, linear, mlp
from shardtensor.checkpoint.live import reshard_module
from shardtensor.comm.process_group import as_group

PLAN = {"0.weight": "[-, tp]"}


class Itself(st.Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


def on(*ranks: int) -> Any:
    return as_group().subgroup(ranks)


def zero(module: nn.Module) -> Any:
    return st.ZeroRedundancyOptimizer(module.named_parameters(), torch.optim.AdamW)


def without_zero() -> None:
    module = mlp()
    before = zero(module)
    module(torch.ones(2, 4)).sum().backward()
    before.step()
    state = before.state_dict()
    reshard_module(module, PLAN)
    optimizer = st.ShardedOptimizer(module, torch.optim.AdamW)
    optimizer.load_state_dict(state)
    optimizer.step()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return mlp()


def overlapping(through_all: bool) -> None:
    """From the first two of three ranks to the last two."""
    module = mlp()
    if as_group().rank < 2:
        st.shard_module(module, {"0.weight": "[tp, -]"}, process_group=on(0, 1))
    if through_all:
        reshard_module(module, {"0.weight": "[tp balanced, -]"})
    reshard_module(module, PLAN, process_group=on(1, 2))


def partly(apart: bool) -> None:
    """Two parameters, one of them on the last rank alone."""
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    st.shard_parameter(module, "0.weight", "[tp, -]")
    if as_group().rank == 1 or not apart:
        st.shard_parameter(module, "1.weight", "[tp, -]", process_group=on(1) if apart else None)
    reshard_module(module, PLAN)


CASES: dict[str, Case] = {
    "the state of a ZeroRedundancyOptimizer": Case(
        lambda: reshard_module(module := mlp(), PLAN, zero(module)),
        {"leave it out, and load its state_dict() into a ShardedOptimizer that is made afterwards": without_zero},
    ),
    "an optimizer of another module": Case(
        lambda: reshard_module(linear(), PLAN, torch.optim.SGD(linear().parameters(), lr=1.0)),
        {
            "pass the optimizers that were made from parameters of this module": lambda: reshard_module(
                module := linear(), PLAN, torch.optim.SGD(module.parameters(), lr=1.0)
            )
        },
    ),
    "a module without values": Case(
        lambda: reshard_module(on_meta(), PLAN),
        {
            "call materialize(module), or load a checkpoint, first": lambda: reshard_module(
                st.materialize(on_meta()), PLAN
            )
        },
    ),
    "a sharder": Case(
        lambda: reshard_module(linear(), {"0": Itself()}),
        {'write a spec, such as "[tp, -]"': lambda: reshard_module(linear(), {"0.weight": "[tp, -]"})},
    ),
    "groups that overlap": Case(
        lambda: overlapping(False),
        {"call reshard_module for a process group that contains both first": lambda: overlapping(True)},
        mesh=3,
    ),
    "a process group for each rank": Case(
        lambda: reshard_module(linear(), PLAN, process_group=None if as_group().rank else on(0)),
        {"pass the same process group, alike on every rank": lambda: reshard_module(linear(), PLAN)},
    ),
    "a tensor on some ranks": Case(
        lambda: partly(True),
        {"shard it on the process group of the others": lambda: partly(False)},
    ),
}
