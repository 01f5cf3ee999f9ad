"""Two linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.tiny.sizes import Sizes
from shardtensor.plan.models.model import Model


class MLP(nn.Module):
    """``fc1`` and ``fc2``."""

    def __init__(self, width: int = 8, hidden: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def shrink(config: Mapping[str, Any], model: Model, sizes: Sizes) -> dict[str, Any]:
    hidden, width = model.by_name["fc1.weight"].shape
    small = sizes.width(width)
    return {"hidden_size": small, "intermediate_size": sizes.width(hidden, unlike=small)}


def make(config: Mapping[str, Any], model: Model) -> nn.Module:
    return MLP(config["hidden_size"], config["intermediate_size"], "fc1.bias" in model.by_name)
