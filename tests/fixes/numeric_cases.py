"""What one step of a small model shows to be wrong with a plan, and what stops such a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from plan.test_plan_mutations import MODELS
from torch import nn

import shardtensor as st
from fixes.case import Case, mlp
from fixes.corrected import Found, of_findings, text_case
from shardtensor.plan.loading import load_plan, read_config
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.sharding.numeric import check_numeric
from shardtensor.sharding.tiny.model import tiny_model
from shardtensor.sharding.tiny.world import small_plan


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


LLAMA = MODELS / "llama3-8b"
WIDE = 'shard 1\ninclude "llama.shard"\nrequire config.hidden_size == 4096 "only this model"\n'


def tiny(text: str, world: int = 8, model: Model | None = None, **params: Any) -> Any:
    config, _ = read_config(LLAMA / "config.json")
    plan = load_plan(text, config=config, world=world, **params)
    model = model or model_from_dims(load_plan("llama", config=config, world=world))
    return tiny_model(text, resolve(plan, model), params)


OTHER = Model((TensorInfo("some.table", (8, 8), ("out", "in")),))
LARGE = "shard 1\nparam tp = 64\nmesh (tp)\nw: replicate\n"
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
    "no tiny model of such names": Case(
        lambda: tiny("shard 1\nmesh (tp = 8)\nunmatched: replicate\n", model=OTHER),
        {"give --module PKG:FN; FN() makes a small one of the same names": lambda: numeric(mlp, {"**": "replicate"})},
        mesh="",
    ),
    "no tiny model of such sizes": Case(
        lambda: tiny(WIDE),
        {"give --module PKG:FN; FN() makes a small one of the same names": lambda: numeric(mlp, {"**": "replicate"})},
        mesh="",
    ),
    "no small world": Case(
        lambda: small_plan("shard 1\nmesh (tp = 64)\n", load_plan("shard 1\nmesh (tp = 64)\n", world=64), {}),
        {
            "give a smaller --world, and values with --set": lambda: small_plan(
                LARGE, load_plan(LARGE, world=8, tp=8), {"tp": 8}
            )
        },
        mesh="",
    ),
}
