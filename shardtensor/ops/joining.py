"""Tensors repeated; those laid end to end (cat, stack) have rows."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.rules.views import repeated
from shardtensor.tensor.dispatch import fall_back, implements
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap


@implements(torch.Tensor.repeat, torch.tile, torch.Tensor.tile)
def repeat(input: torch.Tensor, *times: Any, **kwargs: Any) -> torch.Tensor:
    """Repeat whole dims; a cut dim may be repeated once only, else it gathers."""
    counts = tuple(times[0]) if len(times) == 1 and not isinstance(times[0], int) else times
    counts = tuple(next(iter(kwargs.values()))) if kwargs else counts
    if not isinstance(input, ShardedTensor) or not isinstance(input._layout, CutLayout) or len(counts) < input.dim():
        return fall_back(torch.tile, (input, counts), {})
    x = settled(input)
    assert isinstance(x._layout, CutLayout)
    layout = None if x._layout.is_replicated else repeated(x._layout, counts)
    if layout is None:
        return fall_back(torch.Tensor.repeat, (input, *counts), {})
    return wrap(x._local.repeat(counts), layout, None, x._group)
