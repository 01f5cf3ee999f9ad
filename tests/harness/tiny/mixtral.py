"""Mixtral: Llama's attention and experts, in both formats."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.tiny import llama
from harness.tiny.llama import LlamaAttention, LlamaForCausalLM, LlamaRMSNorm
from harness.tiny.names import ending, shape_of
from harness.tiny.sizes import Sizes
from shardtensor.plan.models.model import Model


class MixtralRMSNorm(LlamaRMSNorm):
    pass


class MixtralBlockSparseTop2MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def routed(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and their weights."""
    weights, ids = logits.softmax(-1).topk(top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True)


class MixtralSparseMoeBlock(nn.Module):
    """Experts are modules; gives the router's logits, too."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MixtralBlockSparseTop2MLP(width, hidden) for _ in range(experts))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden_states.flatten(0, -2)
        logits = self.gate(x)
        ids, weights = routed(logits, self.top_k)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at, which = torch.where(ids == number)
            y = y.index_add(0, at, expert(x[at]) * weights[at, which, None])
        return y.view(hidden_states.shape), logits


class MixtralExperts(nn.Module):
    """Experts are stacked in two tensors."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.num_experts, self.act_fn = experts, F.silu
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) * 0.3)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        y = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            at, which = torch.where(top_k_index == number)
            gate, up = F.linear(hidden_states[at], self.gate_up_proj[number]).chunk(2, -1)
            out = F.linear(self.act_fn(gate) * up, self.down_proj[number])
            y = y.index_add(0, at, out * top_k_weights[at, which, None])
        return y


class MixtralTopKRouter(nn.Module):
    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(experts, width))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return routed(F.linear(hidden_states, self.weight), self.top_k)


class MixtralStackedMoe(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate, self.experts = MixtralTopKRouter(width, experts, top_k), MixtralExperts(width, hidden, experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        ids, weights = self.gate(x)
        return self.experts(x, ids, weights).view(hidden_states.shape)


class MixtralDecoderLayer(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(c)
        self.input_layernorm, self.post_attention_layernorm = MixtralRMSNorm(c.width), MixtralRMSNorm(c.width)
        if c.stacked:
            self.mlp = MixtralStackedMoe(c.width, c.hidden, c.experts, c.top_k)
        else:
            self.block_sparse_moe = MixtralSparseMoeBlock(c.width, c.hidden, c.experts, c.top_k)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states))[0]
        y = self.post_attention_layernorm(x)
        return x + (self.mlp(y) if hasattr(self, "mlp") else self.block_sparse_moe(y)[0])


def mixtral(stacked: bool, tied: bool = False, **sizes: Any) -> LlamaForCausalLM:
    """A model whose experts are stacked, or modules."""
    sizes = {"stacked": stacked, "experts": 4, "top_k": 2, "kv": 4, "vocab": 22} | sizes
    return LlamaForCausalLM(tied, MixtralDecoderLayer, **sizes)


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    name = ending(model, "mlp.experts.gate_up_proj")
    experts, hidden = (
        (model.by_name[name].shape[0], model.by_name[name].shape[1] // 2)
        if name
        else (shape_of(model, "block_sparse_moe.gate.weight")[0], shape_of(model, "experts.0.w1.weight")[0])
    )
    top_k = config.get("num_experts_per_tok", 2)
    more = {"num_local_experts": experts, "num_experts_per_tok": top_k}
    return llama.shrink({**config, "intermediate_size": hidden}, model, sizes) | more


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    stacked = bool(ending(model, "mlp.experts.gate_up_proj"))
    experts, top_k = config["num_local_experts"], config["num_experts_per_tok"]
    tied = bool(config.get("tie_word_embeddings"))
    return mixtral(stacked, tied, experts=experts, top_k=top_k, **llama.sizes_of(config, model))
