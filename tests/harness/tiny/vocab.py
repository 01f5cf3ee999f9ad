"""An embedding and a head that are one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.tiny.sizes import Sizes
from shardtensor.plan.models.model import Model


class Vocab(nn.Module):
    """Gives logits; the loss is the caller's."""

    def __init__(self, vocab: int = 21, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    vocab, width = model.by_name["embed.weight"].shape
    return {"vocab_size": sizes.vocab(vocab), "hidden_size": sizes.width(width)}


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    return Vocab(config["vocab_size"], config["hidden_size"])
