"""T5 and Flan-T5, gated or not: an encoder, and a decoder that attends to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.tiny.attention import attend
from harness.tiny.llama import LlamaRMSNorm
from harness.tiny.names import ending, shape_of
from harness.tiny.sizes import Sizes
from shardtensor.plan.models.model import Model


class T5LayerNorm(LlamaRMSNorm):
    pass


class T5Attention(nn.Module):
    def __init__(self, width: int, heads: int, d_kv: int, buckets: int, causal: bool) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.key_value_proj_dim, self.inner_dim = width, heads, d_kv, heads * d_kv
        self.causal, self.has_relative_attention_bias = causal, buckets > 0
        self.relative_attention_num_buckets, self.relative_attention_max_distance = buckets, 128
        self.q, self.k, self.v = (nn.Linear(width, heads * d_kv, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * d_kv, width, bias=False)
        if buckets:
            self.relative_attention_bias = nn.Embedding(buckets, heads)

    def forward(
        self, hidden_states: torch.Tensor, mask: Any = None, key_value_states: Any = None, position_bias: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        memory = hidden_states if key_value_states is None else key_value_states
        shape = (hidden_states.shape[0], -1, self.n_heads, self.key_value_proj_dim)
        q = self.q(hidden_states).view(shape).transpose(1, 2)
        k, v = (f(memory).view(shape).transpose(1, 2) for f in (self.k, self.v))
        if position_bias is None:
            if self.has_relative_attention_bias:
                places = [torch.arange(t.shape[1], device=t.device) for t in (hidden_states, memory)]
                distance = (places[1][None] - places[0][:, None]).abs()
                distance = distance.clamp(max=self.relative_attention_num_buckets - 1)
                position_bias = self.relative_attention_bias(distance).permute(2, 0, 1).unsqueeze(0)
            else:
                position_bias = q.new_zeros(1, self.n_heads, q.shape[2], k.shape[2])
        y = attend(q, k, v, self.causal, position_bias)
        return self.o(y.view(*y.shape[:-1], self.inner_dim)), position_bias


class T5LayerSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, d_kv: int, buckets: int, causal: bool) -> None:
        super().__init__()
        self.SelfAttention = T5Attention(width, heads, d_kv, buckets, causal)
        self.layer_norm = T5LayerNorm(width)

    def forward(self, hidden_states: torch.Tensor, position_bias: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        y, position_bias = self.SelfAttention(self.layer_norm(hidden_states), position_bias=position_bias)
        return hidden_states + y, position_bias


class T5LayerCrossAttention(nn.Module):
    def __init__(self, width: int, heads: int, d_kv: int) -> None:
        super().__init__()
        self.EncDecAttention = T5Attention(width, heads, d_kv, 0, False)
        self.layer_norm = T5LayerNorm(width)

    def forward(self, hidden_states: torch.Tensor, key_value_states: torch.Tensor) -> torch.Tensor:
        return (
            hidden_states + self.EncDecAttention(self.layer_norm(hidden_states), key_value_states=key_value_states)[0]
        )


class T5DenseActDense(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.wo(F.relu(self.wi(hidden_states)))


class T5DenseGatedActDense(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.wo = nn.Linear(hidden, width, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.wo(F.gelu(self.wi_0(hidden_states)) * self.wi_1(hidden_states))


class T5LayerFF(nn.Module):
    def __init__(self, width: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.DenseReluDense = (T5DenseGatedActDense if gated else T5DenseActDense)(width, hidden)
        self.layer_norm = T5LayerNorm(width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.DenseReluDense(self.layer_norm(hidden_states))


class T5Block(nn.Module):
    def __init__(
        self, width: int, heads: int, d_kv: int, buckets: int, is_decoder: bool, hidden: int, gated: bool
    ) -> None:
        super().__init__()
        cross = [T5LayerCrossAttention(width, heads, d_kv)] if is_decoder else []
        attention = T5LayerSelfAttention(width, heads, d_kv, buckets, is_decoder)
        self.layer = nn.ModuleList([attention, *cross, T5LayerFF(width, hidden, gated)])

    def forward(self, hidden_states: torch.Tensor, memory: Any, position_bias: Any) -> tuple[Any, Any]:
        x, position_bias = self.layer[0](hidden_states, position_bias)
        x = self.layer[1](x, memory) if memory is not None else x
        return self.layer[-1](x), position_bias


class T5Stack(nn.Module):
    def __init__(self, shared: nn.Embedding, blocks: list[T5Block]) -> None:
        super().__init__()
        self.embed_tokens, self.block = shared, nn.ModuleList(blocks)
        self.final_layer_norm = T5LayerNorm(shared.embedding_dim)

    def forward(self, input_ids: torch.Tensor, memory: Any = None) -> torch.Tensor:
        x, position_bias = self.embed_tokens(input_ids), None
        for block in self.block:
            x, position_bias = block(x, memory, position_bias)
        return self.final_layer_norm(x)


class T5ForConditionalGeneration(nn.Module):
    """The decoder sees what the encoder saw, backwards; the loss is computed by the caller."""

    def __init__(
        self,
        vocab: int = 21,
        width: int = 8,
        heads: int = 4,
        d_kv: int = 4,
        hidden: int = 16,
        buckets: int = 8,
        layers: tuple[int, int] = (2, 2),
        gated: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.model_dim = width
        self.shared = nn.Embedding(vocab, width)
        self.encoder, self.decoder = (
            T5Stack(
                self.shared,
                [T5Block(width, heads, d_kv, 0 if i else buckets, is_decoder, hidden, gated) for i in range(count)],
            )
            for count, is_decoder in zip(layers, (False, True), strict=True)
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.shared.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.decoder(input_ids.flip(1), self.encoder(input_ids)))


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    vocab, width = shape_of(model, "shared.weight")
    inner = shape_of(model, "SelfAttention.q.weight")[0]
    heads = config.get("num_heads", 4)
    small = sizes.width(width)
    return {
        "num_heads": heads,
        "d_kv": min(sizes.head, inner // heads),
        "d_model": small,
        "d_ff": sizes.width(shape_of(model, "DenseReluDense.wo.weight")[1], unlike=small),
        "relative_attention_num_buckets": shape_of(model, "relative_attention_bias.weight")[0],
        "num_layers": sizes.layers,
        "num_decoder_layers": sizes.layers,
        "vocab_size": sizes.vocab(vocab),
    }


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    return T5ForConditionalGeneration(
        vocab=config["vocab_size"],
        width=config["d_model"],
        heads=config["num_heads"],
        d_kv=config["d_kv"],
        hidden=config["d_ff"],
        buckets=config["relative_attention_num_buckets"],
        layers=(config["num_layers"], config["num_decoder_layers"]),
        gated=bool(ending(model, "DenseReluDense.wi_0.weight")),
        tied=config.get("tie_word_embeddings", True),
    )
