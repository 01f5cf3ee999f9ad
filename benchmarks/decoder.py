"""The decoder that benchmarks train: grouped attention, gated products, root-mean-square norms."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import nn


@attrs.frozen
class Size:
    """Sizes of a decoder; the default has 1.1 B parameters."""

    layers: int = 16
    width: int = 2048
    heads: int = 16
    hidden: int = 8192
    vocabulary: int = 32000
    sequence: int = 2048

    def flops(self, batch: int) -> float:
        """Floating-point operations of a step's products and attention, forward and backward."""
        tokens = batch * self.sequence
        block = self.width * (2 * self.width + self.width // 2 + 3 * self.hidden)
        products = 6 * tokens * (self.layers * block + self.width * self.vocabulary)
        return products + 6 * self.layers * tokens * self.sequence * self.width


SMALL = Size(layers=3, width=64, heads=4, hidden=128, vocabulary=128, sequence=32)
"""For machines without a GPU: it shows that the benchmark runs, and nothing about speed."""


class Block(nn.Module):
    """Attention and a gated MLP; keys and values have a quarter of the heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, hidden = size.width, size.hidden
        self.head = width // size.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 4, bias=False), nn.Linear(width, width // 4, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Token ids and targets to the mean loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
