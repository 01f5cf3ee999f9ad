"""Tensors laid end to end: cat and stack, and repeat. The dim that is filled must be whole: ``!a d, !b d -> c d``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.engine import run
from shardtensor.ops.out import write_out
from shardtensor.rules.dims import one_dim
from shardtensor.rules.propagate import with_dims
from shardtensor.rules.rule import Rule
from shardtensor.tensor.dispatch import fall_back, implements
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[torch.Tensor], dim: Any = 0, *, out: Any = None, axis: Any = None) -> torch.Tensor:
    """Lay tensors end to end along a dim: ``!a d, !b d -> c d``."""
    dim = dim if axis is None else axis
    if out is not None:
        return write_out(lambda f, a, k: cat(*a, **k), torch.cat, (list(tensors), dim), {"out": out})
    ndim = tensors[0].dim()
    if any(t.dim() != ndim for t in tensors) or not isinstance(dim, int):  # torch skips empty tensors of one dim
        return fall_back(torch.cat, (list(tensors), dim), {})
    size = torch.cat([torch.empty(t.shape, device="meta") for t in tensors], dim).shape[dim]
    d = one_dim(ndim, dim)
    inputs = tuple(tuple(f"part{i}" if k == d else f"d{k}" for k in range(ndim)) for i in range(len(tensors)))
    output = tuple("joined" if k == d else f"d{k}" for k in range(ndim))
    whole = frozenset(f"part{i}" for i in range(len(tensors)))
    result = run("cat", Rule(inputs, output, whole, (("joined", size),)), tensors, lambda *xs: torch.cat(xs, d))
    return fall_back(torch.cat, (list(tensors), dim), {}) if result is None else result


@implements(torch.stack)
def stack(tensors: Sequence[torch.Tensor], dim: int = 0, *, out: Any = None) -> torch.Tensor:
    """Lay tensors of one shape side by side along a new dim: ``d, d -> n d``."""
    if out is not None:
        return write_out(lambda f, a, k: stack(*a, **k), torch.stack, (list(tensors), dim), {"out": out})
    torch.stack([torch.empty(t.shape, device="meta") for t in tensors], dim)  # torch's errors
    ndim = tensors[0].dim()
    letters = tuple(f"d{k}" for k in range(ndim))
    d = one_dim(ndim + 1, dim)
    rule = Rule((letters,) * len(tensors), (*letters[:d], "n", *letters[d:]), made=(("n", len(tensors)),))
    result = run("stack", rule, tensors, lambda *xs: torch.stack(xs, d))
    return fall_back(torch.stack, (list(tensors), dim), {}) if result is None else result


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
