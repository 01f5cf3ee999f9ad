"""New values: tensors like a sharded one, and torch.nn.init, with the dense numbers from the global fan.

Of the functions in torch.nn.init, ``uniform_``, ``normal_``, ``constant_`` and ``kaiming_uniform_`` ask a tensor's
class to do their work. Their own body is run here on a proxy that does not ask again, so that every rank computes
torch's bound from the global shape. The others (``xavier_*``, ``trunc_normal_``, ``orthogonal_``, ...) run their body
on the ShardedTensor as it is and need the operations in it, `torch.eye` into a given tensor among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import init

from shardtensor.ops.random import assign, refuse_leaf
from shardtensor.tensor.copied import refuse_lost_write
from shardtensor.tensor.dispatch import HANDLERS, implements
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

# -- tensors like another ----------------------------------------------------------------------------------------------


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


# -- torch.nn.init -----------------------------------------------------------------------------------------------------


ASKS = (init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_)


class _StandIn:
    """Has what a ShardedTensor has, but for what Python and torch ask of a class."""

    def __init__(self, tensor: ShardedTensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tensor, name)


def _own_body(function: Callable[..., Any]) -> Callable[..., ShardedTensor]:
    def handler(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        function(_StandIn(tensor), *args, **kwargs)
        return tensor

    return handler


for function in ASKS:
    HANDLERS[function] = _own_body(function)


@implements(torch.eye)
def eye(n: int, m: int | None = None, *, out: ShardedTensor, **options: Any) -> ShardedTensor:
    """Write the identity into a ShardedTensor of its shape; each rank writes its own part. Sends nothing."""
    shape = (n, n if m is None else m)
    if tuple(out.shape) != shape:
        raise RuntimeError(f"out has shape {tuple(out.shape)}; it cannot be resized to {shape} as it is sharded")
    refuse_lost_write(out, "eye")
    refuse_leaf(out)
    rank, layout = out._group.rank, out._layout
    local = torch.zeros(layout.local_shape(rank), dtype=out.dtype, device=out.device)
    for here, there in zip(layout.local_boxes(rank), layout.boxes(rank), strict=True):
        row, column = there.offsets
        local[here.slices].view(there.sizes).diagonal(row - column).fill_(1)
    return assign(out, local)
