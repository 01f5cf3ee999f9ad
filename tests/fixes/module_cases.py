"""Errors of sharding modules and of materializing them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardtensor as st
from fixes.case import Case, linear, mlp, tied, weight


def shard(rules: Any, model: nn.Module | None = None, **options: Any) -> nn.Module:
    return st.shard_module(mlp() if model is None else model, rules, **options)


def flows() -> dict[str, Any]:
    return {"0": st.colwise("tp"), "2": st.rowwise("tp")}


CASES: dict[str, Case] = {
    "a parameter that is sharded": Case(
        lambda: st.shard_parameter(linear(), "0.weight", "[-, tp]"),
        {
            "set it to nn.Parameter(distribute(param.full_tensor(), spec))": lambda: setattr(
                linear()[0], "weight", nn.Parameter(st.distribute(linear()[0].weight.full_tensor(), "[-, tp]"))
            )
        },
    ),
    "a partial parameter": Case(
        lambda: linear("[tp, -] partial(dp)"),
        {"leave partial(...) out": lambda: linear("[tp, -]")},
        mesh="dp=1, tp=2",
    ),
    "no such parameter": Case(
        lambda: st.shard_parameter(mlp(), "0.wait", "[tp, -]"),
        {"name one of its parameters": lambda: st.shard_parameter(mlp(), "0.weight", "[tp, -]")},
    ),
    "no tensor": Case(
        lambda: st.shard_parameter(mlp(), "0.in_features", "[tp, -]"),
        {"name a parameter": lambda: st.shard_parameter(mlp(), "0.weight", "[tp, -]")},
    ),
    "a rule that matches nothing": Case(
        lambda: shard({"3.weight": "[tp, -]"}),
        {
            "name a parameter or a module, or write a pattern": lambda: [
                shard({rule: spec})
                for rule, spec in (
                    ("2.weight", "[tp, -]"),
                    ("2", "[tp, ...]"),
                    ("{0,2}.weight", "[tp, -]"),
                    ("**.bias", "[tp]"),
                )
            ]
        },
    ),
    "two rules for one tensor": Case(
        lambda: shard({"**.weight": "[tp, -]", "0.weight": "[-, tp]"}),
        {"narrow one pattern": lambda: shard({"2.weight": "[tp, -]", "0.weight": "[-, tp]"})},
    ),
    "two cuts of a tied tensor": Case(
        lambda: shard({"0.weight": "[tp, -]", "1.weight": "[-, tp]"}, tied()),
        {
            "give both the same cut, or drop the one of": lambda: [
                shard({"0.weight": "[tp, -]", "1.weight": "[tp, -]"}, tied()),
                shard({"0.weight": "[tp, -]"}, tied()),
            ]
        },
    ),
    "a rule that is no spec": Case(
        lambda: shard({"0.weight": 3}), {'write a spec, such as "[tp, -]"': lambda: shard({"0.weight": "[tp, -]"})}
    ),
    "an argument that forward lacks": Case(
        lambda: shard({**flows(), "0": {**st.colwise("tp"), "in hidden": "replicate"}}),
        {"write `in` alone": lambda: shard(flows())},
    ),
    "a ShardedTensor in a flow": Case(
        lambda: shard(flows())(weight("[tp, -]", 2, 4)),
        {
            "give the module that it comes from an `out` in the plan": lambda: shard(flows())(torch.ones(2, 4)),
            "leave `in` and `out` of this layer out of the plan": lambda: shard({"0.weight": "[tp, -]"})(
                weight("[tp, -]", 2, 4)
            ),
        },
    ),
    "a plain tensor in place of a cut one": Case(
        lambda: torch.func.functional_call(shard(flows()), {"0.weight": torch.ones(8, 4)}, torch.ones(2, 4)),
        {
            "torch.empty_like(module.weight).copy_(tensor)": lambda: torch.func.functional_call(
                (model := shard(flows())),
                {"0.weight": torch.empty_like(model[0].weight).copy_(torch.ones(8, 4))},
                torch.ones(2, 4),
            )
        },
    ),
    "no data parallel module": Case(
        lambda: st.no_sync(mlp()).__enter__(),
        {
            "call no_sync on the module that data_parallel returned": lambda: st.no_sync(
                st.data_parallel(mlp(), "dp")
            ).__enter__()
        },
        mesh="dp=2",
    ),
    "materialize on meta": Case(
        lambda: st.materialize(on_meta(), device="meta"),
        {'name another device, such as "cuda"': lambda: st.materialize(on_meta(), device="cpu")},
    ),
    "no way to first values": Case(
        lambda: st.materialize(table()),
        {
            "materialize(module, init=function)": lambda: st.materialize(table(), init=fill),
            "give the module's class a reset_parameters()": lambda: st.materialize(table(Reset)),
            "build the module's buffers outside torch.device('meta')": lambda: st.materialize(table(device="cpu")),
        },
    ),
}


class Table(nn.Linear):
    def __init__(self, device: str | None) -> None:
        super().__init__(4, 4)
        self.register_buffer("table", torch.ones(4, device=device))


class Reset(Table):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "table"):
            self.table.fill_(1)


def table(kind: type[Table] = Table, device: str | None = None) -> nn.Module:
    with torch.device("meta"):
        return st.shard_module(nn.Sequential(kind(device)), {"0.weight": "[tp, -]"})


def fill(module: nn.Module) -> None:
    if isinstance(module, Table):
        module.reset_parameters()
        module.table.fill_(1)


def on_meta() -> nn.Module:
    return st.shard_module(mlp().to("meta"), {"0.weight": "[tp, ...]"})
