"""Tensors made in the likeness of a sharded one: of its shape, they have its layout; of another, they are plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.tensor.dispatch import HANDLERS, implements
from shardtensor.tensor.drawing import draw
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


def _filled(func: Callable[..., Any]) -> Callable[..., Any]:
    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        return _likeness(func(input._local, *args, **kwargs), input)

    return handler


def _likeness(local: torch.Tensor, x: ShardedTensor) -> ShardedTensor:
    layout = x._layout.reduced()
    return wrap(local, layout, x._spec if layout is x._layout else None, x._group)


for _func in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like):
    HANDLERS[_func] = _filled(_func)


def _drawn(sample: Callable[..., Any]) -> Callable[..., Any]:
    """All ranks call it: the numbers are those of the dense call from the first rank's generator state."""

    def handler(input: ShardedTensor, **kwargs: Any) -> ShardedTensor:
        dtype = kwargs.get("dtype") or input.dtype
        device = torch.device(kwargs.get("device") or input.device)
        with torch.no_grad():
            local = draw(
                lambda t, generator: sample(t, generator=generator),
                input._layout.reduced(),
                input._group,
                dtype=dtype,
                device=device,
                generator=kwargs.get("generator"),
            )
        return _likeness(local.requires_grad_(kwargs.get("requires_grad", False)), input)

    return handler


HANDLERS[torch.rand_like] = _drawn(torch.Tensor.uniform_)
HANDLERS[torch.randn_like] = _drawn(torch.Tensor.normal_)


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
