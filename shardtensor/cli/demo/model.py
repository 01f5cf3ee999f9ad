"""A small decoder in plain torch, and one line of spec for each parameter that is cut.

The model does not know that it is sharded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HEAD = 32

SPECS = {
    "embed.weight": "[vocab: tp balanced]",
    "blocks.*.{q,k,v}.weight": f"[out: tp unit({HEAD}) balanced]",
    "blocks.*.{q,k,v}.bias": f"[out: tp unit({HEAD}) balanced]",
    "blocks.*.proj.weight": f"[in: tp unit({HEAD}) balanced]",
    "blocks.*.up.weight": "[out: tp balanced]",
    "blocks.*.up.bias": "[out: tp balanced]",
    "blocks.*.down.weight": "[in: tp balanced]",
}
"""Column-parallel into a block, row-parallel out of it, the vocabulary by rows; norms, positions and the other biases
stay whole."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Tokens ``(batch, length)`` -> logits ``(batch, length, vocabulary)``; the head shares the embedding's weight."""

    def __init__(self, vocabulary: int, length: int, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
