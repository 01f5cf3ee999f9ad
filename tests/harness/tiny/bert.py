"""BERT and MiniLM, with and without the head for masked words."""

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


class BertSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, width // heads, width
        self.query, self.key, self.value = (nn.Linear(width, width, bias) for _ in range(3))

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, cache: Any = None) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, self.attention_head_size)
        q, k, v = (f(hidden_states).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = attend(q, k, v)
        return y.view(*y.shape[:-1], self.all_head_size)


class BertOutput(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, width), nn.LayerNorm(width)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class BertAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self, self.output = BertSelfAttention(width, heads), BertOutput(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output(self.self(hidden_states), hidden_states)


class BertIntermediate(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, hidden)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.dense(hidden_states))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.intermediate = BertAttention(width, heads), BertIntermediate(width, hidden)
        self.output = BertOutput(hidden, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.attention(hidden_states)
        return self.output(self.intermediate(x), x)


class BertEmbeddings(nn.Module):
    position_ids: torch.Tensor

    def __init__(self, vocab: int, width: int, positions: int, kinds: int = 2) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width, padding_idx=0)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(kinds, width)
        self.LayerNorm = nn.LayerNorm(width)
        self.register_buffer("position_ids", torch.arange(positions).expand(1, -1).contiguous())

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(torch.zeros_like(input_ids))
        return self.LayerNorm(x + self.position_embeddings(self.position_ids[:, : input_ids.shape[1]]))


class BertEncoder(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states)
        return hidden_states


class BertPooler(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden_states[:, 0]))


class BertModel(nn.Module):
    def __init__(
        self,
        vocab: int = 21,
        width: int = 16,
        heads: int = 4,
        hidden: int = 32,
        positions: int = 16,
        layers: int = 2,
        has_pooler: bool = True,
    ) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(vocab, width, positions)
        self.encoder = BertEncoder([BertLayer(width, heads, hidden) for _ in range(layers)])
        self.pooler = BertPooler(width) if has_pooler else None

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.encoder(self.embeddings(input_ids))
        return x, self.pooler(x) if self.pooler is not None else None


class BertPredictionHeadTransform(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(F.gelu(self.dense(hidden_states)))


class BertLMPredictionHead(nn.Module):
    def __init__(self, width: int, words: nn.Embedding) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(width)
        self.decoder = nn.Linear(width, words.num_embeddings)
        self.decoder.weight, self.bias = words.weight, self.decoder.bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.transform(hidden_states))


class BertHeads(nn.Module):
    """``cls``: of masked words, and of next sentences where it has one."""

    def __init__(self, width: int, words: nn.Embedding, has_sentences: bool) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(width, words)
        if has_sentences:
            self.seq_relationship = nn.Linear(width, 2)

    def forward(self, sequence_output: torch.Tensor, pooled: Any = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        scores = self.predictions(sequence_output)
        return scores, self.seq_relationship(pooled) if hasattr(self, "seq_relationship") else None


class BertForMaskedLM(nn.Module):
    """Gives the loss of masked words and their scores, as Hugging Face's does when it is given labels."""

    def __init__(self, bert: BertModel, has_sentences: bool = False) -> None:
        super().__init__()
        words = bert.embeddings.word_embeddings
        self.bert, self.cls = bert, BertHeads(words.embedding_dim, words, has_sentences)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores, pairs = self.cls(*self.bert(input_ids))
        if labels is None:
            return scores, pairs
        loss = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))
        return {"loss": loss if pairs is None else loss + pairs.square().mean(), "logits": scores}


KEYS = (
    "num_attention_heads", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings",
    "vocab_size",
)  # fmt: skip


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    table, hidden = shape_of(model, "word_embeddings.weight"), shape_of(model, "intermediate.dense.weight")[0]
    return dict(zip(KEYS, sizes.of_stack(config.get("num_attention_heads", 4), table, hidden), strict=True))


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    bert = BertModel(
        vocab=config["vocab_size"],
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        hidden=config["intermediate_size"],
        positions=config["max_position_embeddings"],
        layers=config["num_hidden_layers"],
        has_pooler=bool(ending(model, "pooler.dense.weight")),
    )
    if not ending(model, "embeddings.position_ids"):  # newer files leave it out
        bert.embeddings._non_persistent_buffers_set.add("position_ids")
    if not ending(model, "cls.predictions.bias"):
        return bert
    return BertForMaskedLM(bert, bool(ending(model, "cls.seq_relationship.weight")))
