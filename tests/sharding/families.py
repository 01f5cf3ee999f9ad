"""Tiny models of the families that plans are shipped for, from scratch, with the names of the real ones.

Each computes what the real one computes where it matters to a plan: heads are split by the attributes that the real
code reads, and losses are taken where the real code takes them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, bias: Any = None) -> torch.Tensor:
    """(batch, heads, tokens, d) each, to (batch, tokens, heads * d)."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads_of(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.view(*x.shape[:2], -1, width).transpose(1, 2)


class MLP(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


# -- Llama -------------------------------------------------------------------------------------------------------------


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaAttention(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.num_key_value_groups = c.heads // c.kv
        self.q_proj = nn.Linear(c.width, c.heads * c.head_dim, bias=c.bias)
        self.k_proj = nn.Linear(c.width, c.kv * c.head_dim, bias=c.bias)
        self.v_proj = nn.Linear(c.width, c.kv * c.head_dim, bias=c.bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=False)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
        q, k, v = (heads_of(f(hidden_states), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        return self.o_proj(attend(q, k, v, causal=True)), None


class LlamaMLP(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.width, c.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(c), LlamaMLP(c)
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(c.width), LlamaRMSNorm(c.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), attention_mask=None)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, c: SimpleNamespace, layer: Any = LlamaDecoderLayer) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList(layer(c) for _ in range(2))
        self.norm = LlamaRMSNorm(c.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Gives the loss and the logits, as Hugging Face's do when they are given labels."""

    def __init__(self, tied: bool = False, layer: Any = LlamaDecoderLayer, **sizes: Any) -> None:
        super().__init__()
        sizes = {"width": 8, "heads": 4, "kv": 2, "head_dim": 4, "hidden": 16, "vocab": 21, "bias": False} | sizes
        self.config = SimpleNamespace(**sizes)
        self.vocab_size = self.config.vocab
        self.model = LlamaModel(self.config, layer)
        self.lm_head = nn.Linear(self.config.width, self.config.vocab, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.lm_head(self.model(ids))
        if labels is None:
            return {"logits": logits}
        shifted = logits.to(torch.promote_types(logits.dtype, torch.float32))[:, :-1].reshape(-1, self.vocab_size)
        return {"loss": F.cross_entropy(shifted, labels[:, 1:].reshape(-1)), "logits": logits}


# -- GPT-2 -------------------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.randn(nf) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class GPT2Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = heads, width // heads, width
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.view(*t.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for t in self.c_attn(x).split(self.split_size, dim=2)
        )
        return self.c_proj(attend(q, k, v, causal=True))


class GPT2MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), GPT2Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), GPT2MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(GPT2Block(width, heads) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT2LMHeadModel(nn.Module):
    """The head is tied to the embedding; the loss is computed by the caller."""

    def __init__(self, vocab: int = 21, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.transformer = GPT2Model(vocab, width, heads)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer(ids))


# -- BERT --------------------------------------------------------------------------------------------------------------


class BertSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, width // heads, width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, self.attention_head_size)
        q, k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = attend(q, k, v)
        return y.view(*y.shape[:-1], self.all_head_size)


class BertOutput(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self, self.output = BertSelfAttention(width, heads), BertOutput(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.self(x), x)


class BertIntermediate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.dense(x))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.intermediate = BertAttention(width, heads), BertIntermediate(width)
        self.output = BertOutput(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class BertEmbeddings(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width, padding_idx=0)
        self.position_embeddings, self.token_type_embeddings = nn.Embedding(16, width), nn.Embedding(2, width)
        self.LayerNorm = nn.LayerNorm(width)
        self.register_buffer("position_ids", torch.arange(16).expand(1, -1).contiguous())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids))
        return self.LayerNorm(x + self.position_embeddings(self.position_ids[:, : ids.shape[1]]))


class BertEncoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(width, heads) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class BertPooler(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class BertModel(nn.Module):
    def __init__(self, vocab: int = 21, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embeddings, self.encoder = BertEmbeddings(vocab, width), BertEncoder(width, heads)
        self.pooler = BertPooler(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embeddings(ids))
        return x.mean(1) + self.pooler(x)


# -- T5 ----------------------------------------------------------------------------------------------------------------


class T5LayerNorm(LlamaRMSNorm):
    pass


class T5Attention(nn.Module):
    def __init__(self, width: int, heads: int, d_kv: int, has_bias: bool, causal: bool) -> None:
        super().__init__()
        self.n_heads, self.key_value_proj_dim, self.inner_dim = heads, d_kv, heads * d_kv
        self.causal, self.has_relative_attention_bias = causal, has_bias
        self.q, self.k, self.v = (nn.Linear(width, heads * d_kv, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * d_kv, width, bias=False)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(8, heads)

    def forward(
        self, hidden_states: torch.Tensor, key_value_states: Any = None, position_bias: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        memory = hidden_states if key_value_states is None else key_value_states
        shape = (hidden_states.shape[0], -1, self.n_heads, self.key_value_proj_dim)
        q = self.q(hidden_states).view(shape).transpose(1, 2)
        k, v = (f(memory).view(shape).transpose(1, 2) for f in (self.k, self.v))
        if position_bias is None:
            if self.has_relative_attention_bias:
                places = [torch.arange(t.shape[1], device=t.device) for t in (hidden_states, memory)]
                distance = (places[1][None] - places[0][:, None]).abs().clamp(max=7)
                position_bias = self.relative_attention_bias(distance).permute(2, 0, 1).unsqueeze(0)
            else:
                position_bias = q.new_zeros(1, self.n_heads, q.shape[2], k.shape[2])
        y = attend(q, k, v, self.causal, position_bias)
        return self.o(y.view(*y.shape[:-1], self.inner_dim)), position_bias


class T5LayerSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, d_kv: int, has_bias: bool, causal: bool) -> None:
        super().__init__()
        self.SelfAttention = T5Attention(width, heads, d_kv, has_bias, causal)
        self.layer_norm = T5LayerNorm(width)

    def forward(self, x: torch.Tensor, position_bias: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        y, position_bias = self.SelfAttention(self.layer_norm(x), position_bias=position_bias)
        return x + y, position_bias


class T5LayerCrossAttention(nn.Module):
    def __init__(self, width: int, heads: int, d_kv: int) -> None:
        super().__init__()
        self.EncDecAttention = T5Attention(width, heads, d_kv, False, False)
        self.layer_norm = T5LayerNorm(width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.EncDecAttention(self.layer_norm(x), key_value_states=memory)[0]


class T5DenseGatedActDense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.wo = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(F.gelu(self.wi_0(x)) * self.wi_1(x))


class T5LayerFF(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.DenseReluDense, self.layer_norm = T5DenseGatedActDense(width), T5LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Block(nn.Module):
    def __init__(self, width: int, heads: int, d_kv: int, has_bias: bool, is_decoder: bool) -> None:
        super().__init__()
        cross = [T5LayerCrossAttention(width, heads, d_kv)] if is_decoder else []
        self.layer = nn.ModuleList(
            [T5LayerSelfAttention(width, heads, d_kv, has_bias, is_decoder), *cross, T5LayerFF(width)]
        )

    def forward(self, x: torch.Tensor, memory: Any, position_bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, position_bias = self.layer[0](x, position_bias)
        x = self.layer[1](x, memory) if memory is not None else x
        return self.layer[-1](x), position_bias


class T5Stack(nn.Module):
    def __init__(self, shared: nn.Embedding, width: int, heads: int, d_kv: int, is_decoder: bool) -> None:
        super().__init__()
        self.embed_tokens = shared
        self.block = nn.ModuleList(T5Block(width, heads, d_kv, i == 0, is_decoder) for i in range(2))
        self.final_layer_norm = T5LayerNorm(width)

    def forward(self, ids: torch.Tensor, memory: Any = None) -> torch.Tensor:
        x, position_bias = self.embed_tokens(ids), None
        for block in self.block:
            x, position_bias = block(x, memory, position_bias)
        return self.final_layer_norm(x)


class T5ForConditionalGeneration(nn.Module):
    def __init__(self, vocab: int = 21, width: int = 8, heads: int = 4, d_kv: int = 4) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        self.encoder = T5Stack(self.shared, width, heads, d_kv, False)
        self.decoder = T5Stack(self.shared, width, heads, d_kv, True)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.decoder(ids.flip(1), self.encoder(ids)))


# -- Mixtral -----------------------------------------------------------------------------------------------------------


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
    weights, ids = logits.softmax(-1).topk(top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True)


class MixtralSparseMoeBlock(nn.Module):
    """Experts are modules; gives the router's logits, too."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int = 2) -> None:
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

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return routed(F.linear(x, self.weight), self.top_k)


class MixtralStackedMoe(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int, top_k: int = 2) -> None:
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
            self.mlp = MixtralStackedMoe(c.width, c.hidden, c.experts)
        else:
            self.block_sparse_moe = MixtralSparseMoeBlock(c.width, c.hidden, c.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))[0]
        y = self.post_attention_layernorm(x)
        return x + (self.mlp(y) if hasattr(self, "mlp") else self.block_sparse_moe(y)[0])


def mixtral(stacked: bool, **sizes: Any) -> LlamaForCausalLM:
    sizes = {"stacked": stacked, "experts": 4, "kv": 4, "vocab": 22} | sizes
    return LlamaForCausalLM(layer=MixtralDecoderLayer, **sizes)


# -- ViT ---------------------------------------------------------------------------------------------------------------


class ViTPatchEmbeddings(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, width, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x).flatten(2).transpose(1, 2)


class ViTEmbeddings(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.randn(1, 5, width))
        self.patch_embeddings = ViTPatchEmbeddings(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embeddings(x)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position_embeddings


class ViTSelfOutput(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)


class ViTAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.output = BertSelfAttention(width, heads), ViTSelfOutput(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.attention(x))


class ViTLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.intermediate = ViTAttention(width, heads), BertIntermediate(width)
        self.output = ViTSelfOutput(2 * width, width)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.layernorm_before(x))
        return x + self.output(self.intermediate(self.layernorm_after(x)))


class ViTModel(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embeddings = ViTEmbeddings(width)
        self.encoder = BertEncoder(width, heads)
        self.encoder.layer = nn.ModuleList(ViTLayer(width, heads) for _ in range(2))
        self.layernorm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layernorm(self.encoder(self.embeddings(x)))


class ViTForImageClassification(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, labels: int = 3) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=8)
        self.vit, self.classifier = ViTModel(width, heads), nn.Linear(width, labels)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.vit(pixel_values)[:, 0])


# -- a vocabulary; uneven heads ----------------------------------------------------------------------------------------


class Vocab(nn.Module):
    def __init__(self, vocab: int = 21, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(ids)))


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
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 18, bias=False), nn.Linear(18, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class UnevenBlock(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.attn, self.mlp = UnevenAttention(width, head), UnevenMLP(width)
        self.gate = nn.Linear(width, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x) + self.gate(x).sigmoid().mean(-1, keepdim=True)


class Uneven(nn.Module):
    """Five heads."""

    def __init__(self, heads: int = 5, head: int = 2) -> None:
        super().__init__()
        width = heads * head
        self.embed = nn.Embedding(8, width)
        self.big, self.odd = nn.Linear(width, 4, bias=False), nn.Linear(4, 10, bias=False)
        self.h = nn.ModuleList(UnevenBlock(width, head) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.odd(self.big(x))
