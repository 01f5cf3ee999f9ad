"""Attention as every family here computes it, once heads are apart."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(batch, heads, tokens, d) each, to (batch, tokens, heads * d)."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """(batch, tokens, heads * width) to (batch, heads, tokens, width)."""
    return x.view(*x.shape[:2], -1, width).transpose(1, 2)
