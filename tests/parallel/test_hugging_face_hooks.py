"""Imported plans at work: latent attention, and experts of which one gives back what it gets."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.plan.text.reading import read_plan

HEADS, NOPE, ROPE, VALUE, RANK, EMBED, HIDDEN, EXPERTS = 4, 3, 2, 5, 6, 8, 12, 2


class LatentAttention(nn.Module):
    """Keys and values of all heads from one latent; beside it a part of the keys that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b_proj = nn.Linear(EMBED, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(EMBED, RANK + ROPE)
        self.kv_a_layernorm = nn.LayerNorm(RANK)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, EMBED, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q = self.q_b_proj(x).view(batch, length, -1, NOPE + ROPE).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([RANK, ROPE], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, -1, NOPE + VALUE).transpose(1, 2)
        nope, value = kv.split([NOPE, VALUE], dim=-1)
        shared = shared.unsqueeze(1).expand(-1, nope.shape[1], -1, -1)
        scores = q @ torch.cat([nope, shared], dim=-1).transpose(-1, -2)
        return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1))


class Experts(nn.Module):
    """Experts in stacked tensors, each a gate and an up in one; the last choice is to give the token back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, EMBED) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, EMBED, HIDDEN) / 3)
        self.identity_expert = nn.Identity()

    def forward(self, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        total = top_k_weights[..., -1:] * self.identity_expert(hidden_states)
        for e in range(EXPERTS):
            gate, up = (hidden_states @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            total = total + top_k_weights[..., e : e + 1] * ((gate.sigmoid() * up) @ self.down_proj[e].T)
        return total


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = LatentAttention()
        self.gate = nn.Linear(EMBED, EXPERTS + 1, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x)
        return x + self.experts(x, self.gate(x).softmax(-1))


TP_PLAN = {
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
    "experts.identity_expert": "moe_identity_expert",
    "experts": "moe_tp_experts",
}


def off_the_dense_gradients(instead: tuple[str, str] = ("", "")) -> float:
    """How far gradients are from the dense ones, as a part of these; results are compared on the way."""
    torch.manual_seed(0)
    oracle = Layer().double().to(device())
    module = copy.deepcopy(oracle)
    text = st.plan_text_from_hf(TP_PLAN).replace(*instead)
    st.shard_module(module, read_plan(text, config={"qk_rope_head_dim": ROPE}, world=2))
    x = torch.randn(2, 3, EMBED, dtype=torch.float64, device=device())
    want, got = oracle(x), module(x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    want.square().sum().backward()
    got.square().sum().backward()
    found = dict(module.named_parameters())
    off = 0.0
    for name, parameter in oracle.named_parameters():
        grad = found[name].grad
        grad = grad.full_tensor() if isinstance(grad, st.ShardedTensor) else grad
        off = max(off, float((grad - parameter.grad).norm() / parameter.grad.norm()))
    return off


@pytest.mark.worlds("sim", "gloo")
def test_an_imported_plan_gives_the_dense_results(world):
    assert max(world(off_the_dense_gradients, 2)) < 1e-9


@pytest.mark.worlds("sim")
def test_the_shared_part_of_keys_needs_its_sum(world):
    word = "hf_mla_kv_a_proj(tp, rope=config.qk_rope_head_dim)"
    assert max(world(off_the_dense_gradients, 2, instead=(word, "hf_whole()"))) > 0.01
