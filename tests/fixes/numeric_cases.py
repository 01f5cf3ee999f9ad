"""What one step of a small model shows to be wrong with a plan, and what stops such a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import shardtensor as st
from fixes.case import Case
from fixes.corrected import Found, of_findings, text_case
from shardtensor.cli.check import compare_step
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.plan import Plan
from shardtensor.trace.check import check_numeric


class Block(nn.Module):
    """Two products on a scaled input."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.inner = Inner(reads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale)


class Inner(nn.Module):
    """Two products; `reads` says what its code does with what is between them."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.heads = reads, 4
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.reads == "mean":
            return self.down(h) + h.mean()
        if self.reads == "heads":
            h = h.view(*h.shape[:-1], self.heads, 2).tanh().flatten(-2)
        return self.down(h)


def step(module: nn.Module, sample: int) -> torch.Tensor:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(sample), dtype=torch.float64)
    return module(x).square().sum()


IN = {"in": "replicate"}
UP, DOWN = st.colwise("tp"), {**st.rowwise("tp"), "bias": "replicate"}
WHOLE = {"up": {**UP, "out": "[..., tp] -> replicate"}, "down": "replicate"}
PLANS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "a sum that is made twice": ("", {"in": "replicate grad partial(tp)", "up": {**UP, **IN}, "down": DOWN}),
    "a sum that is made once": ("", {"up": {**UP, **IN}, "down": DOWN}),
    "a sum that nobody computes": ("", {**IN, "up": UP, "down": {**DOWN, "out": "partial(tp)"}}),
    "a sum that the layer computes": ("", {**IN, "up": UP, "down": DOWN}),
    "a mean of parts": ("mean", {**IN, "up": UP, "down": DOWN}),
    "a mean of the whole": ("mean", WHOLE),
    "heads of a rank": ("heads", {**IN, "up": UP, "down": DOWN}),
    "heads of a rank, counted": ("heads", {**IN, "up": UP, "down": DOWN, "local heads": "[tp]"}),
}


def found_in(name: str) -> list[Found]:
    """What one step finds in a plan."""
    reads, rules = PLANS[name]
    plan = Plan.from_rules({"scale": "replicate", "inner": rules}, "tp=2")
    return of_findings(check_numeric(plan, lambda: (Block(reads), step)))


class Unknown(nn.Module):
    """A module without a layer that says what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def numeric(make: Callable[[], Any], rules: Mapping[str, Any] | None = None) -> None:
    assert not check_numeric(Plan.from_rules(rules or {"weight": "[tp]"}, "tp=2"), make)


def large() -> nn.Module:
    module = Unknown()
    module.weight = nn.Parameter(torch.empty(1).expand(1 << 27))
    return module


def of_family(model_type: str, **keys: Any) -> Any:
    if model_type != "scaled":
        raise ValueError(f"Unrecognized model identifier: {model_type}")
    return SimpleNamespace(**keys, to_dict=lambda: {"model_type": model_type, **keys})


TRANSFORMERS = SimpleNamespace(
    __version__="5",
    AutoConfig=SimpleNamespace(for_model=of_family),
    Scaled=lambda config: Block() if config.is_small else None,
)
SCALED = {"model_type": "scaled", "architectures": ["Scaled"], "is_small": True}


PLAN = "shard 1\nmesh (tp = 2)\nunmatched: replicate\ndims scale (rows = 8)\n"


def small(module: str | None = None, found: Any = TRANSFORMERS, **config: Any) -> None:
    """Make and run the model of a configuration, as ``check --numeric`` does."""
    with TemporaryDirectory() as folder, patch.dict(sys.modules, {"transformers": found}):
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config or {"hidden_size": 8}))
        plan = load_plan(PLAN, config=path, world=2)
        options = SimpleNamespace(module=module, model=path, world=2, plan=PLAN, no_step=False, numeric=True)
        found, _ = compare_step(options, resolve(plan, model_from_dims(plan)))
        assert not found


OWN = {"give --module PKG:FN; FN() makes a small one of the same names": partial(small, module=f"{__name__}:Block")}
CASES: dict[str, Case] = {
    "a sum that is made twice": text_case(
        found_in, "a sum that is made twice", {"drop a `grad partial(...)`": "a sum that is made once"}
    ),
    "a sum that nobody computes": text_case(
        found_in,
        "a sum that nobody computes",
        {"write `rowwise(tp)` for `inner.down`": "a sum that the layer computes"},
    ),
    "a part for the whole": text_case(
        found_in,
        "a mean of parts",
        {"look at the flows of the modules before it": "a mean of the whole"},
    ),
    "a count of the whole": text_case(
        found_in,
        "heads of a rank",
        {"write `local heads: [tp]` in the rules of `inner`": "heads of a rank, counted"},
    ),
    "a module that nobody can call": Case(
        lambda: numeric(Unknown),
        {"let the function return (module, step)": lambda: numeric(lambda: (Unknown(), step))},
        mesh="",
    ),
    "no module to run": Case(small, OWN, mesh=""),
    "a model too large to run": Case(partial(small, module=f"{__name__}:large"), OWN, mesh=""),
    "no transformers to make the model": Case(
        partial(small, found=None, **SCALED), {**OWN, "install transformers": partial(small, **SCALED)}, mesh=""
    ),
    "a model that transformers does not know": Case(partial(small, **{**SCALED, "model_type": "odd"}), OWN, mesh=""),
}
