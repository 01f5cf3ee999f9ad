"""Errors of rules in Python, of other ways to write layouts, of tables of tensors, and of what plans are read from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fixes.case import Case
from shardtensor.plan.estimates.search import candidates
from shardtensor.plan.interop.dtensor import placements_from_spec, spec_from_placements
from shardtensor.plan.loading import load_plan, read_config
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.plan import Plan
from shardtensor.plan.python_rules import read_axes, read_call, read_store

PLAN = "shard 1\nmesh (tp = 2)\n"


def of(rules: Mapping[Any, Any]) -> Callable[[], Plan]:
    return lambda: Plan.from_rules(rules, "tp=2")


def tensors(*lines: str, config: Mapping[str, Any] | None = None) -> None:
    model_from_dims(load_plan("\n".join([PLAN, *lines, ""]), config=config, world=2))


def config_at(name: str) -> None:
    """Read a configuration from a folder where one is in `there`."""
    with TemporaryDirectory() as folder:
        Path(folder, "there").mkdir()
        Path(folder, "there", "config.json").write_text('{"hidden_size": 8}')
        Path(folder, "empty.json").write_text("{}")
        read_config(Path(folder, name))


def tried(mesh: str, *lines: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "plan.shard")
        path.write_text("\n".join(["shard 1", *lines, f"mesh ({mesh})", "w: replicate", ""]))
        candidates(path, config={}, world=4)


CASES: dict[str, Case] = {
    name: Case(wrong, ways, mesh="")
    for name, (wrong, ways) in {
        "a pattern that is no text": (
            of({3: "[tp, -]"}),
            {"write text: `layers.*.weight`": of({"layers.*.weight": "[tp, -]"})},
        ),
        "a pattern of two words": (
            of({"maybe w": "[tp, -]"}),
            {
                "write dotted names, after `optional` where they may be missing": of(
                    {"a.w": "[tp]", "optional w": "[tp, -]"}
                )
            },
        ),
        "no side of a module": (
            of({"a": {"in x y": "replicate"}}),
            {
                "write `in`, `in NAME`, `out`, `out NAME`, `local NAME` or `use`": of(
                    {
                        "a": {
                            "in": "replicate",
                            "in x": "replicate",
                            "out": "replicate",
                            "out 1": "replicate",
                            "local n": "[tp]",
                            "use": "cross_entropy()",
                        }
                    }
                )
            },
        ),
        "devices for a number": (
            of({"a": {"local n": 'chunk(dim=0, placements=["rank:0"])'}}),
            {"write such as `[tp]` or `replicate`": of({"a": {"local n": "[tp]", "local m": "replicate"}})},
        ),
        "no call": (
            lambda: read_call("dispatch"),
            {"such as `dispatch(ep, top_k=2)`": lambda: read_call("dispatch(ep, top_k=2)")},
        ),
        "no argument": (
            lambda: read_call('f("text")'),
            {"axes, numbers, `true` or `false`; those with a name last": lambda: read_call("f(ep, 2, true, x=false)")},
        ),
        "no store": (
            lambda: read_store("[tp]"),
            {"write `flat(dp) by layers.*`": lambda: read_store("flat(dp) by layers.*")},
        ),
        "no axis of the data": (
            lambda: read_axes("dp=2, tp=2", "ep"),
            {"use one of dp, tp": lambda: read_axes("dp=2, tp=2", "dp")},
        ),
        "placements for other axes": (
            lambda: spec_from_placements([Shard(0)], "dp=2, tp=2", (8, 8)),
            {
                "give one placement for each axis of the mesh": lambda: spec_from_placements(
                    [Replicate(), Shard(0)], "dp=2, tp=2", (8, 8)
                )
            },
        ),
        "a placement of no dim": (
            lambda: spec_from_placements([Shard(2)], "tp=2", (8, 8)),
            {"dims are 0 to 1": lambda: [spec_from_placements([Shard(dim)], "tp=2", (8, 8)) for dim in (0, 1)]},
        ),
        "a placement of another kind": (
            lambda: spec_from_placements([Partial("product")], "tp=2", (8, 8)),
            {
                "redistribute it first: dtensor.redistribute(placements=[Replicate(), ...])": lambda: (
                    spec_from_placements([Replicate()], "tp=2", (8, 8))
                )
            },
        ),
        "placements that no spec says": (
            lambda: spec_from_placements([Replicate(), _StridedShard(0, split_factor=2)], "dp=2, tp=2", (3, 4)),
            {
                "or redistribute it first to placements without _StridedShard": lambda: spec_from_placements(
                    [Replicate(), Shard(0)], "dp=2, tp=2", (3, 4)
                )
            },
        ),
        "a spec that no placements say": (
            lambda: placements_from_spec("[tp balanced, -]", "tp=4", (10, 8)),
            {
                "`[tp sizes(3, 3, 3, 1), -]` is the nearest that it can": lambda: placements_from_spec(
                    "[tp sizes(3, 3, 3, 1), -]", "tp=4", (10, 8)
                )
            },
        ),
        "no configuration": (
            lambda: config_at("nowhere"),
            {"give the path of the model's config.json": lambda: config_at("there/config.json")},
        ),
        "an empty configuration": (
            lambda: config_at("empty.json"),
            {"give the path of the model's config.json": lambda: config_at("there")},
        ),
        "no tensors": (
            tensors,
            {
                'include the lines of a family, as in `include "llama.dims.shard"`': lambda: tensors(
                    "dims w (out = 4)"
                ),
                "give --safetensors model.safetensors.index.json": lambda: None,
                "give --module package.module:function": lambda: None,
            },
        ),
        "two sizes of a tensor": (
            lambda: tensors("dims w (out = 4)", "dims w (out = 8)"),
            {"keep one of the two lines": lambda: tensors("dims w (out = 4)")},
        ),
        "no parameter that changes the mesh": (
            lambda: tried("tp = 4"),
            {"write `param tp = 8` and use it in `mesh`": lambda: tried("dp = world / tp, tp", "param tp = 2")},
        ),
    }.items()
}
