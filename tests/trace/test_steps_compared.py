"""One step on local ranks finds what is wrong with a plan, at the line that says how the parameter lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.tiny.bert import BertModel
from parallel.family_plans import FAMILIES, SPECS, plan_for
from torch import nn

import shardtensor as st
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.report import folded
from shardtensor.plan.loading import load_plan
from shardtensor.plan.plan import Plan
from shardtensor.trace.check import check_numeric

SHIPPED: list[tuple[str, str, int, dict[str, Any]]] = [
    ("mlp", "mlp", 2, {}),
    ("llama", "llama", 4, {"tp": 4, "sp": True}),
    ("gpt2", "gpt2", 2, {}),
    ("bert", "bert", 2, {}),
    ("t5", "t5", 2, {}),
    ("vit", "vit", 2, {}),
    ("mixtral", "mixtral_stacked", 4, {"tp": 2, "ep": 2}),
    ("vocab", "vocab", 2, {}),
    ("llama_2d", "llama_tied", 4, {"tp": 2}),
]


@pytest.mark.parametrize(("name", "family", "size", "params"), SHIPPED, ids=lambda value: str(value).replace(" ", ""))
def test_nothing_is_found_in_a_plan_that_is_right(name, family, size, params):
    assert check_numeric(plan_for(name, family, size, **params), FAMILIES[family].make) == ()


def found_after(name: str, family: str, world: int, old: str, new: str, **params: Any) -> tuple[Finding, ...]:
    """What is found once a part of a shipped plan is another."""
    text = (SPECS / f"{name}.shard").read_text()
    assert old in text
    plan = load_plan(text.replace(old, new), config=FAMILIES[family].config, world=world, **params)
    return folded(check_numeric(plan, FAMILIES[family].make))


def lines_of(findings: tuple[Finding, ...]) -> set[str]:
    return {each.origin.text for each in findings if each.origin is not None}


def test_weights_of_experts_whose_gradients_are_partials():
    weights = "in top_k_weights: replicate grad partial(tp)"
    found = found_after(
        "mixtral", "mixtral_stacked", 4, weights, "in top_k_weights: replicate grad replicate", tp=2, ep=2
    )
    assert any("mlp.gate" in str(each) and "off by" in each.fault for each in found)


def test_an_in_around_a_residual_is_refused_before_anything_runs():
    attention = "attention.self {\n        in: replicate\n"
    found = found_after(
        "bert", "bert", 2, attention, "attention {\n        in: replicate\n    }\n    attention.self {\n"
    )
    assert {each.code for each in found} == {"E401"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.block = nn.Parameter(torch.rand(8) + 0.5), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * self.scale)


def scaled(around: dict[str, str], up: dict[str, str]) -> tuple[Finding, ...]:
    down = {**st.rowwise("tp"), "bias": "replicate"}
    rules = {"scale": "replicate", "block": {**around, "up": {**st.colwise("tp"), **up}, "down": down}}
    return check_numeric(Plan.from_rules(rules, "tp=4"), lambda: (Scaled(), step))


def step(module: nn.Module, sample: int) -> torch.Tensor:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(sample), dtype=torch.float64)
    return module(x).square().sum()


def test_a_sum_that_is_made_twice_is_told_with_its_number():
    enters = {"in": "replicate"}
    assert scaled({}, enters) == scaled(enters, {}) == scaled(enters, enters) == ()
    (found,) = scaled({"in": "replicate grad partial(tp)"}, enters)
    assert found.fault == "the gradient of `scale` is 4 times too large"
    assert found.tensor == "scale"


def test_a_count_that_is_left_out_is_told_as_what_stops_the_module():
    (found,) = found_after("bert", "bert", 2, "local num_attention_heads: [tp] if fits else replicate", "")
    assert found.why.startswith("`encoder.layer.0.attention.self` stops: RuntimeError")
    assert found.origin.text == "[tp unit(hd)] if fits else replicate", (
        "what the block of that module says of the other count"
    )
    assert found.fix == "write `local num_attention_heads: [tp]` in the rules of `encoder.layer.*.attention.self`"


def test_a_layer_that_does_not_run_is_told_at_its_own_line():
    (found,) = found_after("bert", "bert", 2, "intermediate.dense:     colwise(tp)", "intermediate.dense: replicate")
    assert found.origin.text == "replicate", "with it the layer after it gets the features of its shard"
    assert found.fix.startswith("write `colwise(tp)` for ")


def test_what_resolve_refuses_is_told_and_nothing_runs():
    plan = Plan.from_rules({"encoder": "replicate"}, "tp=2")
    assert {each.code for each in check_numeric(plan, BertModel) if each.severity == "error"} == {"E301"}


STORED = """shard 1
include "std/styles.shard"
mesh (rep = {rep}, dp = {dp}, tp = {tp})
data rep*dp
fc1: colwise(tp)
fc2: rowwise(tp)
store **: flat(dp)
"""


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (1, 1, 1)], ids=str)
def test_what_is_stored_on_axes_of_one_rank_trains_as_the_dense_module(sizes):
    rep, dp, tp = sizes
    plan = load_plan(STORED.format(rep=rep, dp=dp, tp=tp), world=rep * dp * tp)
    assert check_numeric(plan, FAMILIES["mlp"].make) == ()
