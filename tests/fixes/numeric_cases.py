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
from shardtensor.cli.model_source import small_model
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.plan import Plan
from shardtensor.sharding.numeric import check_numeric


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


def of_family(model_type: str, **keys: Any) -> Any:
    if model_type != "scaled":
        raise ValueError(f"Unrecognized model identifier: {model_type}")
    return SimpleNamespace(**keys)


TRANSFORMERS = SimpleNamespace(
    AutoConfig=SimpleNamespace(for_model=of_family), Scaled=lambda config: Block() if config.is_small else None
)
SCALED = {"model_type": "scaled", "architectures": ["Scaled"], "is_small": True}


def small(rows: int = 8, module: str | None = None, found: Any = TRANSFORMERS, **config: Any) -> None:
    """Make and run the model of a configuration, of a plan for a tensor of so many rows."""
    text = f"shard 1\nmesh (tp = 2)\nunmatched: replicate\ndims scale (rows = {rows})\n"
    plan = load_plan(text, world=2)
    with TemporaryDirectory() as folder, patch.dict(sys.modules, {"transformers": found}):
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config or {"hidden_size": 8}))
        options = SimpleNamespace(module=module, model=path, world=2)
        make, _ = small_model(options, resolve(plan, model_from_dims(plan)))
        assert not check_numeric(plan, make)


OWN = {"give --module PKG:FN; FN() makes a small one of the same names": partial(small, module=f"{__name__}:Block")}
CASES: dict[str, Case] = {
    "a sum that is made twice": text_case(
        found_in, "a sum that is made twice", {"drop a `grad partial(...)`": "a sum that is made once"}
    ),
    "a part for the whole": text_case(
        found_in,
        "a mean of parts",
        {"or a part is taken for the whole: look at the flows of the last layers": "a mean of the whole"},
    ),
    "a count of the whole": text_case(
        found_in,
        "heads of a rank",
        {"an attribute that counts may want a `local`": "heads of a rank, counted"},
    ),
    "a module that nobody can call": Case(
        lambda: numeric(Unknown),
        {"let the function return (module, step)": lambda: numeric(lambda: (Unknown(), step))},
        mesh="",
    ),
    "no module to run": Case(small, OWN, mesh=""),
    "a model too large to run": Case(
        partial(small, 1 << 27, **SCALED),
        {**OWN, "give a config.json of smaller sizes and fewer layers": partial(small, **SCALED)},
        mesh="",
    ),
    "no transformers to make the model": Case(
        partial(small, found=None, **SCALED), {**OWN, "install transformers": partial(small, **SCALED)}, mesh=""
    ),
    "a model that transformers does not know": Case(partial(small, **{**SCALED, "model_type": "odd"}), OWN, mesh=""),
}
