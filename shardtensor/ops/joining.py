"""Tensors laid end to end: cat and stack, and repeat. The dim that is filled must be whole: ``!a d, !b d -> c d``."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.rules.propagate import with_dims
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
    new = len(counts) - x.dim()
    assert isinstance(x._layout, CutLayout)
    if x._layout.is_replicated or any(
        c != 1 and cut is not None for c, cut in zip(counts[new:], x._layout.dims, strict=True)
    ):
        return fall_back(torch.Tensor.repeat, (input, *counts), {})
    shape = (*counts[:new], *(c * n for c, n in zip(counts[new:], x.shape, strict=True)))
    layout = with_dims(x._layout, shape, (*(None,) * new, *x._layout.dims))
    return wrap(x._local.repeat(counts), layout, None, x._group)
