"""A small decoder, written as people write them: grouped attention, a gated MLP, norms, a vocabulary at both ends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardtensor as st

WIDTH, HEAD = 12, 4


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, heads * HEAD, bias=bias)
        self.k = nn.Linear(WIDTH, kv_heads * HEAD, bias=bias)
        self.v = nn.Linear(WIDTH, kv_heads * HEAD, bias=bias)
        self.o = nn.Linear(heads * HEAD, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (_heads(f(x)) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(max(q.shape[1], 1) // max(t.shape[1], 1), 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], x.shape[-1] // HEAD, HEAD).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, hidden, bias=bias)
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, heads: int, kv_heads: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(heads, kv_heads, bias)
        self.mlp = MLP(hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(
        self, heads: int = 4, kv_heads: int = 4, hidden: int = 16, words: int = 16, bias: bool = True, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH, padding_idx=1)
        self.layers = nn.ModuleList(Layer(heads, kv_heads, hidden, bias) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def rules(
    stream: str = "replicate", balanced: bool = False, axes: Any = "tp", kv: dict[str, Any] | None = None
) -> dict:
    """A plan for it; `kv` is the style of keys and values where it is not that of queries."""
    queries = st.colwise(axes, unit=HEAD, balanced=balanced)
    enters = "replicate" if stream == "replicate" else f"{stream} -> replicate"
    names = axes if isinstance(axes, str) else "*".join(axes)
    cut = f"{names} balanced"
    found: dict[str, Any] = {
        "embed": {"weight": f"[vocab: {cut}]", "out": f"partial({names}) -> {stream}"},
        "layers.*": {
            "attn": {
                "in": enters,
                "q": queries,
                "{k,v}": queries if kv is None else kv,
                "o": st.rowwise(axes, unit=HEAD, to=stream, balanced=balanced),
            },
            "mlp": {
                "in": enters,
                "{gate,up}": st.colwise(axes, balanced=balanced),
                "down": st.rowwise(axes, to=stream, balanced=balanced),
            },
        },
        "head": {"weight": f"[out: {cut}]", "in": enters, "out": f"[..., {cut}] -> replicate"},
    }
    if stream != "replicate":
        found["layers.*"]["norm{1,2}"] = st.along(stream)
        found["norm"] = st.along(stream)
    return found
