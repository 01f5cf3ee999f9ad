"""Errors of losses, layers and gradients in parallel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shardtensor as st
from fixes.case import Case


def loss(targets: torch.Tensor) -> torch.Tensor:
    return st.ParallelCrossEntropy(6, "[..., tp]")(torch.ones(2, 3), targets)


CASES: dict[str, Case] = {
    "class probabilities": Case(
        lambda: loss(torch.ones(2, 6) / 6),
        {
            "give class indices": lambda: loss(torch.arange(2)),
            "call torch.nn.functional.cross_entropy with ShardedTensors": lambda: F.cross_entropy(
                st.distribute(torch.ones(2, 6), "[-, tp]"), torch.ones(2, 6) / 6
            ),
        },
    ),
}
