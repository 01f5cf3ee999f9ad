"""Tensors repeated; those laid end to end (cat, stack) have rows."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.engine import on_grid
from shardtensor.rules.views import repeated
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap


def _counts(times: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    given = next(iter(kwargs.values())) if kwargs else times
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int) else tuple(given)


@implements(torch.tile, torch.Tensor.tile)
def tile(input: torch.Tensor, *times: Any, **kwargs: Any) -> torch.Tensor:
    """``repeat``, for which dims in front may be left out."""
    counts = _counts(times, kwargs)
    return repeat(input, (1,) * (input.dim() - len(counts)) + counts)


@implements(torch.Tensor.repeat)
def repeat(input: torch.Tensor, *times: Any, **kwargs: Any) -> torch.Tensor:
    """Repeat dims, new ones in front; a dim that is cut is laid end to end with itself."""
    counts = _counts(times, kwargs)
    torch.empty(input.shape, device="meta").repeat(counts)  # torch's errors
    if not isinstance(input, ShardedTensor):
        return input.repeat(counts)
    x = settled(input)
    if not isinstance(x._layout, CutLayout):
        there = on_grid("repeat", x)
        x = x if there is None else there
    if not isinstance(x._layout, CutLayout):
        return fall_back(torch.Tensor.repeat, (input, *counts), {})
    if x._layout.is_whole_on_all(x._group.size):
        return x._local.repeat(counts)
    new = len(counts) - x.dim()
    for d in x._layout.cut_dims:
        if counts[new + d] > 1:
            joined = torch.cat([x] * counts[new + d], d)
            return repeat(joined, tuple(1 if k == new + d else c for k, c in enumerate(counts)))
    layout = None if x._layout.is_replicated else repeated(x._layout, counts)
    if layout is None:
        return fall_back(torch.Tensor.repeat, (input, *counts), {})
    return wrap(x._local.repeat(counts), layout, None, x._group)
