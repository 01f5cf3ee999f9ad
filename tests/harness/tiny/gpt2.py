"""GPT-2: fused queries, keys and values in a layer whose weight is (in, out)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.tiny.attention import attend
from harness.tiny.names import ending, shape_of
from harness.tiny.sizes import Sizes
from shardtensor.plan.models.model import Model


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.randn(nf) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class GPT2Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim, self.split_size = width, heads, width // heads, width
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.view(*t.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for t in self.c_attn(hidden_states).split(self.split_size, dim=2)
        )
        return self.c_proj(attend(q, k, v, causal=True))


class GPT2MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(hidden, width), Conv1D(width, hidden)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(hidden_states)))


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), GPT2Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), GPT2MLP(width, hidden)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states + self.attn(self.ln_1(hidden_states))
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, hidden: int, positions: int, layers: int) -> None:
        super().__init__()
        self.embed_dim = width
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(GPT2Block(width, heads, hidden) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT2LMHeadModel(nn.Module):
    """The head is tied to the embedding; the loss is computed by the caller."""

    def __init__(
        self, vocab: int = 21, width: int = 16, heads: int = 4, hidden: int = 64, positions: int = 16, layers: int = 2
    ) -> None:
        super().__init__()
        self.transformer = GPT2Model(vocab, width, heads, hidden, positions, layers)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer(input_ids))


KEYS = ("n_head", "n_embd", "n_inner", "n_layer", "n_positions", "vocab_size")


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    table, hidden = shape_of(model, "wte.weight"), shape_of(model, "mlp.c_fc.bias")[0]
    return dict(zip(KEYS, sizes.of_stack(config.get("n_head", 4), table, hidden), strict=True))


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    whole = "transformer.wte.weight" in model.by_name
    made = (GPT2LMHeadModel if whole else GPT2Model)(
        vocab=config["vocab_size"],
        width=config["n_embd"],
        heads=config["n_head"],
        hidden=config["n_inner"],
        positions=config["n_positions"],
        layers=config["n_layer"],
    )
    masks = {"bias": torch.ones(1, 1, 1, 1, dtype=torch.bool), "masked_bias": torch.tensor(-1e4)}
    for attention in made.modules():  # what older files carry
        for name, value in masks.items():
            if isinstance(attention, GPT2Attention) and ending(model, f"attn.{name}"):
                attention.register_buffer(name, value)
    return made
