"""Errors of fully sharded modules."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor as st
from fixes.case import Act, Case, grid, linear, mlp, step, tied, units
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import MixedPrecisionPolicy, fully_shard
from shardtensor.fsdp.summary import fsdp_summary


def stepped(model: Any, optimizer: Any, change: Act = lambda: None) -> None:
    loss = model(torch.ones(2, 4)).sum()
    change()
    loss.backward()
    optimizer.step()


def written_between(model: nn.Module, early: bool) -> None:
    loss = model(torch.ones(2, 4)).sum()
    if not early:
        loss.backward()
    with torch.no_grad():
        model[0].weight.mul_(2)
    if early:
        loss.backward()


def deep() -> nn.Module:
    """Large units that are gathered again in backward."""
    model = nn.Sequential(*(nn.Linear(4 if i == 0 else 200, 200) for i in range(4)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model)


class List(nn.Module):
    """A container that is never called, inside of one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CASES: dict[str, Case] = {
    "twice": Case(
        lambda: fully_shard(fully_shard(mlp())),
        {"call fully_shard once for each module": lambda: [fully_shard(mlp()), units()]},
        mesh="dp=2",
    ),
    "top down": Case(
        lambda: fully_shard(fully_shard(mlp())[0]),
        {"call fully_shard bottom up: inner modules first": lambda: units()},
        mesh="dp=2",
    ),
    "a container": Case(
        lambda: fully_shard(List().layers),
        {
            "call it for each module in the container, or for the module that holds it": lambda: [
                [fully_shard(layer) for layer in List().layers],
                fully_shard(List()),
            ]
        },
        mesh="dp=2",
    ),
    "a tie between units": Case(
        lambda: [fully_shard(layer) for layer in tied()],
        {"on one that holds both": lambda: step_ids(fully_shard(tied()))},
        mesh="dp=2",
    ),
    "no such axis": Case(
        lambda: units(mesh="tp"),
        {
            'pass the DeviceMesh of the data ranks, mesh["dp"], or names of axes, "dp" or "rep*dp"': lambda: [
                units(mesh="dp"),
                units(mesh="rep*dp"),
            ]
        },
        mesh="rep=2, dp=2",
    ),
    "a mesh of three axes": Case(
        lambda: units(mesh=grid(("pp", 1), ("rep", 2), ("dp", 2))),
        {
            'name the data axes: mesh["dp"], or mesh["rep", "dp"] to repeat along the first': lambda: [
                step(units(mesh="dp")),
                step(units(mesh="rep*dp")),
            ]
        },
        mesh="pp=1, rep=2, dp=2",
    ),
    "a number of ranks that does not divide": Case(
        lambda: units(reshard_after_forward=3),
        {
            "give a divisor of their number": lambda: step(units(reshard_after_forward=2)),
            "give True (all of them) or False (each rank)": lambda: [
                step(units(reshard_after_forward=value)) for value in (True, False)
            ],
        },
        mesh="dp=4",
    ),
    "a sum of bytes": Case(
        lambda: units(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8)),
        {
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)": lambda: step(
                units(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            ),
            "freeze the parameter: requires_grad_(False)": lambda: fully_shard(
                mlp().requires_grad_(False), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8)
            )(torch.ones(2, 4)),
        },
        mesh="dp=2",
    ),
    "a cut of a dim that is not there": Case(
        lambda: fully_shard(mlp(), shard_placement_fn=lambda p: Shard(1)),
        {
            "return None to let its ranges end anywhere": lambda: fully_shard(
                mlp(), shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None
            )
        },
        mesh="dp=2",
    ),
    "a placement that has no meaning": Case(
        lambda: fully_shard(mlp(), shard_placement_fn=lambda p: "[dp balanced, ...]"),
        {
            "return None or flat(dp), and ranges end anywhere; flat(dp, unit=row)": lambda: [
                fully_shard(mlp(), shard_placement_fn=lambda p, form=form: form)
                for form in (None, "flat(dp)", "flat(dp, unit=row)", "flat(dp, unit=16)")
            ],
            "return torch's Shard(dim)": lambda: fully_shard(mlp(), shard_placement_fn=lambda p: Shard(0)),
        },
        mesh="dp=2",
    ),
    "a cut of a cut dim": Case(
        lambda: over_tp(lambda p: Shard(1) if p.dim() > 1 else None),
        {
            "cut another dim, or return flat(dp)": lambda: [
                over_tp(lambda p: Shard(0) if p.dim() > 1 else None),
                over_tp(lambda p: "flat(dp)"),
            ]
        },
        mesh="dp=2, tp=2",
    ),
    "sharded over the data ranks": Case(
        lambda: fully_shard(linear("[dp, -]")),
        {"shard_module(module, plan, process_group=mesh), then fully_shard(module, mesh=": lambda: over_tp(None)},
        mesh="dp=2",
    ),
    "written between forward and backward": Case(
        lambda: written_between(deep(), early=True),
        {"call backward before the optimizer steps": lambda: written_between(deep(), early=False)},
        mesh="dp=2",
    ),
    "second derivatives": Case(
        lambda: fully_shard(mlp())(torch.ones(2, 4)).sum().backward(create_graph=True),
        {
            "keep what needs second derivatives out of fully_shard": lambda: (
                mlp()(torch.ones(2, 4)).sum().backward(create_graph=True)
            )
        },
        mesh="dp=2",
    ),
    "gradients of some parameters": Case(
        lambda: torch.autograd.grad((model := fully_shard(mlp()))(torch.ones(2, 4)).sum(), [model[0].weight]),
        {
            "call loss.backward() without inputs=, and read param.grad; freeze others": lambda: [
                (model := mlp())[2].requires_grad_(False),
                fully_shard(model),
                step(model),
                model[0].weight.grad.full_tensor(),
            ]
        },
        mesh="dp=2",
    ),
    "a pickle": Case(
        lambda: pickle.dumps(units()),
        {
            "save model.state_dict(), build the module anew, fully_shard it and load that": lambda: (
                units().load_state_dict(pickle.loads(pickle.dumps(units().state_dict())))
            )
        },
        mesh="dp=2",
    ),
    "no method of this name": Case(
        lambda: st.register_fsdp_forward_method(units(), "generate"),
        {"name one of its methods": lambda: st.register_fsdp_forward_method(units(), "extra_repr")},
        mesh="dp=2",
    ),
    "resharding by a number": Case(
        lambda: units().set_reshard_after_forward(2),
        {"give a number of ranks to fully_shard(reshard_after_forward=)": lambda: step(units(reshard_after_forward=2))},
        mesh="dp=4",
    ),
    "division by zero": Case(
        lambda: units().set_gradient_divide_factor(0),
        {"give a number above 0": lambda: units().set_gradient_divide_factor(2)},
        mesh="dp=2",
    ),
    "a list with a plain module": Case(
        lambda: st.share_comm_ctx([mlp()]),
        {"call fully_shard on it first": lambda: st.share_comm_ctx([units()])},
        mesh="dp=2",
    ),
    "a summary of a plain module": Case(
        lambda: fsdp_summary(mlp()), {"call fully_shard first": lambda: str(fsdp_summary(units()))}, mesh="dp=2"
    ),
    "a parameter that was taken out": Case(
        lambda: step(without_bias(units())),
        {"change modules before fully_shard": lambda: step(fully_shard(without_bias(mlp())))},
        mesh="dp=2",
    ),
    "on meta": Case(
        lambda: step(units_on_meta()),
        {
            "materialize(model)": lambda: step(st.materialize(units_on_meta())),
            'model.to_empty(device="cpu"), then set or load values': lambda: [
                (model := units_on_meta()).to_empty(device="cpu"),
                model.load_state_dict(mlp().state_dict()),
                step(model),
            ],
        },
        mesh="dp=2",
    ),
    "ranks that go different ways": Case(
        lambda: branch(branches(), as_group().rank),
        {
            "let every rank call the same modules in the same order": lambda: branch(branches(), 0),
            "call fully_shard on a module that holds all of them instead": lambda: branch(
                fully_shard(Branch(), find_unused=True), as_group().rank
            ),
        },
        mesh="dp=2",
    ),
    "ranks that use different parameters": Case(
        lambda: [(model := fully_shard(Branch())), *(branch(model, as_group().rank) for _ in range(2))],
        {
            "fully_shard(..., find_unused=True)": lambda: [
                (model := fully_shard(Branch(), find_unused=True)),
                *(branch(model, as_group().rank) for _ in range(2)),
            ],
            "let every rank use every parameter, or none": lambda: [
                branch(model, 0) for model in [fully_shard(Branch())] * 2
            ],
        },
        mesh="dp=2",
    ),
}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.ways[way](x)


def without_bias(model: Any) -> Any:
    model[0].bias = None
    return model


def branches() -> Any:
    """Each branch a unit of its own."""
    return fully_shard(Branch(), policy=lambda module: isinstance(module, nn.Linear))


def branch(model: nn.Module, way: int) -> None:
    model(torch.ones(2, 4), way).sum().backward()


def step_ids(model: nn.Module) -> None:
    model(torch.arange(8)).sum().backward()


def units_on_meta() -> Any:
    with torch.device("meta"):
        return units()


def over_tp(placement: Any) -> Any:
    mesh = grid(("dp", as_group().size // 2), ("tp", 2))
    model = st.shard_module(mlp(), {"{0,2}.weight": "[-, tp]"}, process_group=mesh)
    return fully_shard(model, mesh=mesh.axis("dp"), shard_placement_fn=placement)
