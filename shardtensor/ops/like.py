"""Tensors made in the likeness of a sharded one: of its shape, they have its layout; of another, they are plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.tensor.dispatch import HANDLERS, implements
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


def _filled(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        return _likeness(func(input._local, *args, **kwargs), input)

    return handler


def _likeness(local: torch.Tensor, x: ShardedTensor) -> ShardedTensor:
    layout = x._layout.reduced()
    return wrap(local, layout, x._spec if layout is x._layout else None, x._group)


for _like in ("zeros_like", "ones_like", "empty_like", "full_like"):
    HANDLERS[getattr(torch, _like)] = _filled(getattr(torch, _like))


def _new(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        size = kwargs.pop("size", None)
        if size is None:
            size, rest = (args[0], args[1:]) if args and not isinstance(args[0], int) else (args, ())
        else:
            rest = args
        shape = tuple(size)
        if shape != tuple(input.shape):
            return func(input._local, shape, *rest, **kwargs)
        return _likeness(func(input._local, input._local.shape, *rest, **kwargs), input)

    return handler


for _func in (torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty):
    HANDLERS[_func] = _new(_func)


@implements(torch.Tensor.new_full)
def new_full(input: ShardedTensor, size: Any, fill_value: Any, **kwargs: Any) -> torch.Tensor:
    """A tensor of one value; of the shape of `input`, it has its layout."""
    if tuple(size) != tuple(input.shape):
        return input._local.new_full(tuple(size), fill_value, **kwargs)
    return _likeness(input._local.new_full(input._local.shape, fill_value, **kwargs), input)


@implements(torch.Tensor.new_tensor)
def new_tensor(input: ShardedTensor, data: Any, **kwargs: Any) -> torch.Tensor:
    """A plain tensor of `data`, of the dtype and device of `input`."""
    data = data.full_tensor() if isinstance(data, ShardedTensor) else data
    return input._local.new_tensor(data, **kwargs)
