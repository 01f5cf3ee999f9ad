"""Heads that no number of ranks divides, and matrices that plans split by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.tiny.attention import attend, heads_of
from harness.tiny.sizes import Sizes
from shardtensor.plan.models.model import Model


class UnevenAttention(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads_of(f(x), self.head) for f in (self.q, self.k, self.v))
        return self.o(attend(q, k, v))


class UnevenMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class UnevenBlock(nn.Module):
    def __init__(self, width: int, head: int, hidden: int) -> None:
        super().__init__()
        self.attn, self.mlp = UnevenAttention(width, head), UnevenMLP(width, hidden)
        self.gate = nn.Linear(width, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x) + self.gate(x).sigmoid().mean(-1, keepdim=True)


class Uneven(nn.Module):
    """The rows of ``gate`` and all of ``odd`` are numbers that the plan names."""

    def __init__(self, heads: int = 5, head: int = 2, hidden: int = 18, vocab: int = 8, layers: int = 2) -> None:
        super().__init__()
        width = heads * head
        self.embed = nn.Embedding(vocab, width)
        self.big, self.odd = nn.Linear(width, width, bias=False), nn.Linear(4, 10, bias=False)
        self.h = nn.ModuleList(UnevenBlock(width, head, hidden) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.odd(self.big(x)[..., :4])


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    width = model.by_name["embed.weight"].shape[1]
    heads = config.get("n_head", 25)
    return {
        "n_head": heads,
        "n_embd": heads * min(sizes.head, width // heads),
        "n_inner": sizes.width(model.by_name["h.0.mlp.up.weight"].shape[0]),
        "n_layer": sizes.layers,
        "vocab_size": sizes.width(model.by_name["embed.weight"].shape[0]),
    }


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    heads = config["n_head"]
    return Uneven(heads, config["n_embd"] // heads, config["n_inner"], config["vocab_size"], config["n_layer"])
