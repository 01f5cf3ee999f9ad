"""``use dispatch`` takes the place of a forward: only of one that gives the same, by the options that say it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardtensor as st

WIDTH, EXPERTS, TOP_K = 6, 4, 2


class Block(nn.Module):
    """A router and experts that are modules; `kind` says what its forward does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.top_k = kind, TOP_K
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, states: torch.Tensor) -> Any:
        x = states.flatten(0, -2)
        scores = self.gate(x)
        chances = scores.sigmoid() if "sigmoid" in self.kind else scores.softmax(-1)
        weights, ids = chances.topk(self.top_k, -1)
        if "shares" not in self.kind:
            weights = weights / weights.sum(-1, keepdim=True)
        if "doubled in training" in self.kind and self.training:
            weights = weights * 2
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at, which = torch.where(ids == number)
            out = out.index_add(0, at, expert(x[at]) * weights[at, which, None])
        out = out.view(states.shape)
        if "list" in self.kind:
            return [out, scores]
        return out if "alone" in self.kind else (out, scores)


class Stacked(nn.Module):
    """Experts in two tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.act_fn = kind, F.silu
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * 5, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            at, which = torch.where(ids == number)
            both = F.linear(x[at], self.gate_up_proj[number])
            gate, up = (both[:, ::2], both[:, 1::2]) if "interleaved" in self.kind else both.chunk(2, -1)
            act = F.gelu if "gelu" in self.kind else self.act_fn
            y = F.linear(act(gate) * up, self.down_proj[number])
            out = out.index_add(0, at, y * weights[at, which, None])
        return out


PLAN = """shard 1
mesh (ep = 2)
data ep
moe {
    optional gate: replicate
    optional experts.<ep>: replicate
    optional {gate_up,down}_proj: [ep, -, -]
    USE
}
"""


def results(module: nn.Module, use: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What the module gives on two ranks that hold its experts, each rank with the same tokens."""

    def body() -> Any:
        root = nn.Module()
        root.moe = copy.deepcopy(module)
        return st.shard_module(root, st.load_plan(PLAN.replace("USE", f"use {use}"), world=2)).moe(*inputs)

    return st.simulate("ep=2", body)


def refusal(module: nn.Module, use: str) -> str:
    with pytest.raises(st.PlanError) as caught:
        results(module, use)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["alone", "shares", "alone shares"])
def test_the_fix_names_the_options_of_the_modules_own_forward(kind):
    block, x = Block(kind), torch.randn(3, 5, WIDTH)
    text = refusal(block, f"dispatch(ep, top_k={TOP_K})")
    assert "moe: `use dispatch(...)` would not do what this block does" in text
    for got in results(block, re.search(r"write `use (.*)`", text)[1], x):
        torch.testing.assert_close(got, block(x))


def test_what_the_module_says_of_itself_is_the_default():
    block, x = Block("shares"), torch.randn(7, WIDTH)
    block.norm_topk_prob = False
    for got in results(block, f"dispatch(ep, top_k={TOP_K})", x):
        torch.testing.assert_close(got, block(x))


@pytest.mark.parametrize("module", [Block("sigmoid"), Block("doubled in training"), Block("list"),
                                    Stacked("interleaved"), Stacked("gelu")], ids=lambda m: m.kind)  # fmt: skip
def test_a_forward_that_no_option_says_is_refused(module):
    text = refusal(module, f"dispatch(ep, top_k={TOP_K})")
    assert "@register_hook" in text and ("apart by" in text or "a list of" in text)
    if isinstance(module, Block) and module.kind == "doubled in training":
        refusal(module.eval(), f"dispatch(ep, top_k={TOP_K})")


def test_it_is_asked_of_modules_without_values_too():
    with torch.device("meta"):
        alone, stacked = Block("alone"), Stacked("gelu")
    assert "write `use dispatch(ep, top_k=2, normalize=true, logits=false)`" in refusal(alone, "dispatch(ep, top_k=2)")
    assert "@register_hook" in refusal(stacked, "dispatch(ep, top_k=2)")


def test_a_forward_that_fails_on_a_few_tokens_is_refused_with_its_error():
    class Broken(Block):
        def forward(self, states: torch.Tensor, mask: torch.Tensor) -> Any:
            return super().forward(states) * mask

    assert "TypeError" in refusal(Broken(""), "dispatch(ep, top_k=2)")


def test_comparing_draws_no_random_numbers_and_leaves_the_module_as_it_is():
    block = Block("").eval()
    before, parameters = torch.get_rng_state(), dict(block.named_parameters())
    root = nn.Module()
    root.moe = block
    st.simulate("ep=1", lambda: st.shard_module(root, {"moe": {"use": "dispatch(ep, top_k=2)"}}))
    assert torch.equal(torch.get_rng_state(), before)
    assert [name for name, _ in block.named_parameters()] == list(parameters) and not block.gate.training
