"""Tensors repeated, and what is made of ``cat``, ``stack``, ``reshape`` and ``expand``, which have rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.engine import on_grid
from shardtensor.rules.dims import one_dim
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


@implements(torch.repeat_interleave, torch.Tensor.repeat_interleave)
def repeat_interleave(
    input: torch.Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    """Repeat every index of a dim: by one number where it lies, by a vector as it is picked."""
    if dim is None:
        input, dim = input.reshape(-1), 0
    d = one_dim(input.dim(), dim)
    if isinstance(repeats, torch.Tensor):
        if not repeats.dim() or repeats.numel() == 1:
            repeats = int(repeats)
        else:
            repeats = repeats.full_tensor() if hasattr(repeats, "full_tensor") else repeats
            places = torch.arange(input.shape[d], device=repeats.device)
            return input.index_select(d, places.repeat_interleave(repeats, output_size=output_size))
    if not input.dim() or repeats < 0:
        return fall_back(torch.repeat_interleave, (input, repeats, dim), {"output_size": output_size})
    shape = list(input.shape)
    shape.insert(d + 1, repeats)
    # A copy, as torch's: what is made of one element, or of none, would be a view.
    repeated = input.unsqueeze(d + 1).expand(shape).clone(memory_format=torch.contiguous_format).flatten(d, d + 1)
    return repeated if repeats else input.narrow(d, 0, 0).clone()


@implements(torch.atleast_1d)
def atleast_1d(*tensors: Any) -> Any:
    """Tensors of one dim or more."""
    return _each(tensors, lambda x: x if x.dim() else x.reshape(1))


@implements(torch.atleast_2d)
def atleast_2d(*tensors: Any) -> Any:
    """Tensors of two dims or more."""
    return _each(tensors, lambda x: x if x.dim() > 1 else x.reshape(1, -1) if x.dim() else x.reshape(1, 1))


def _each(tensors: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        return change(tensors[0])
    return tuple(map(change, tensors[0] if len(tensors) == 1 else tensors))


@implements(torch.hstack)
def hstack(tensors: Sequence[torch.Tensor], *, out: Any = None) -> torch.Tensor:
    """Laid end to end along the second dim, vectors along the first."""
    parts = atleast_1d(*tensors) if len(tensors) > 1 else (atleast_1d(tensors[0]),)
    return torch.cat(parts, 0 if parts[0].dim() == 1 else 1, out=out)


@implements(torch.vstack)
def vstack(tensors: Sequence[torch.Tensor], *, out: Any = None) -> torch.Tensor:
    """Rows laid below each other."""
    return torch.cat([atleast_2d(x) for x in tensors], 0, out=out)


@implements(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> tuple[torch.Tensor, ...]:
    """All of one shape."""
    tensors = tuple(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor) else tensors
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)
