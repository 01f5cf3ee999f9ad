"""Attention as every family here computes it, once heads are apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(batch, heads, tokens, d) each, to (batch, tokens, heads * d)."""
    if bias is not None and causal:  # which are one argument of the kernel
        ahead = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        bias, causal = bias.masked_fill(ahead, float("-inf")), False
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal).transpose(1, 2).flatten(2)


def heads_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """(batch, tokens, heads * width) to (batch, heads, tokens, width)."""
    return x.view(*x.shape[:2], -1, width).transpose(1, 2)
