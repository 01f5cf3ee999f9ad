"""Llama, Mistral, Qwen: dense decoders with grouped attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.tiny.attention import attend, heads_of
from harness.tiny.names import ending, shape_of
from harness.tiny.sizes import Sizes
from shardtensor.plan.models.model import Model

DEFAULTS: dict[str, Any] = {
    "width": 8, "heads": 4, "kv": 2, "head_dim": 4, "hidden": 16, "vocab": 21, "layers": 2,
    "bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False,
}  # fmt: skip


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * (hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaAttention(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.num_key_value_groups = c.heads // c.kv
        self.q_proj = nn.Linear(c.width, c.heads * c.head_dim, bias=c.bias)
        self.k_proj = nn.Linear(c.width, c.kv * c.head_dim, bias=c.bias)
        self.v_proj = nn.Linear(c.width, c.kv * c.head_dim, bias=c.bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = LlamaRMSNorm(c.head_dim), LlamaRMSNorm(c.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (heads_of(f(hidden_states), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        return self.o_proj(attend(q, k, v, causal=True)), None


class LlamaMLP(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = c.width, c.hidden
        self.gate_proj, self.up_proj = (nn.Linear(c.width, c.hidden, bias=c.mlp_bias) for _ in range(2))
        self.down_proj = nn.Linear(c.hidden, c.width, bias=c.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.hidden_size = c.width
        self.self_attn, self.mlp = LlamaAttention(c), LlamaMLP(c)
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(c.width), LlamaRMSNorm(c.width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states), attention_mask=None)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, c: SimpleNamespace, layer: Any = LlamaDecoderLayer) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(layer(c) for _ in range(c.layers))
        self.norm = LlamaRMSNorm(c.width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Gives the loss and the logits, as Hugging Face's do when they are given labels."""

    def __init__(self, tied: bool = False, layer: Any = LlamaDecoderLayer, **sizes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**(DEFAULTS | sizes))
        self.vocab_size = self.config.vocab
        self.model = LlamaModel(self.config, layer)
        self.lm_head = nn.Linear(self.config.width, self.config.vocab, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return {"logits": logits}
        shifted = logits.to(torch.promote_types(logits.dtype, torch.float32))[:, :-1].reshape(-1, self.vocab_size)
        return {"loss": F.cross_entropy(shifted, labels[:, 1:].reshape(-1)), "logits": logits}


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    queries, width = shape_of(model, "self_attn.q_proj.weight")
    keys = shape_of(model, "self_attn.k_proj.weight")[0]
    heads = config.get("num_attention_heads") or queries // math.gcd(queries, keys)
    head = min(sizes.head, queries // heads)
    small = heads * head if width == queries else sizes.width(width)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads * keys // queries,
        "head_dim": head,
        "hidden_size": small,
        "intermediate_size": sizes.width(_hidden(config, model), unlike=small),
        "num_hidden_layers": sizes.layers,
        "vocab_size": sizes.vocab(shape_of(model, "embed_tokens.weight")[0]),
    }


def _hidden(config: Mapping[str, Any], model: Model) -> int:
    """Of the gated layer; experts are called otherwise."""
    if ending(model, "mlp.gate_proj.weight"):
        return shape_of(model, "mlp.gate_proj.weight")[0]
    return config["intermediate_size"]


def sizes_of(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The arguments of `LlamaForCausalLM`: sizes as a configuration has them, and what the names of tensors tell."""
    return {
        "width": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "hidden": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "layers": config["num_hidden_layers"],
        "bias": ending(model, "self_attn.q_proj.bias"),
        "o_bias": ending(model, "self_attn.o_proj.bias"),
        "mlp_bias": ending(model, "mlp.gate_proj.bias"),
        "qk_norm": ending(model, "self_attn.q_norm.weight"),
    }


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    sizes = sizes_of(config, model)
    if not ending(model, "model.norm.weight"):
        return LlamaModel(SimpleNamespace(**sizes))
    return LlamaForCausalLM(tied=bool(config.get("tie_word_embeddings")), **sizes)
