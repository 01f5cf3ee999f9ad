"""A ShardedTensor turned in place: ``t_`` and its kin. The local tensor is turned with it, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.layout.layout import CutLayout, replicated
from shardtensor.ops.random import refuse_leaf
from shardtensor.ops.views import _order, permuted
from shardtensor.tensor.dispatch import HANDLERS, refuse_lost_write, warn_of_gather
from shardtensor.tensor.sharded_tensor import ShardedTensor


def _turns(func: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., ShardedTensor]:
    """The handler of `func`, which does in place what `new` does in a view."""

    def handler(input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        refuse_lost_write(input, func.__name__)
        order = _order(new, input.dim(), (*args, *kwargs.values()))
        refuse_leaf(input)
        layout = input._layout
        if isinstance(layout, CutLayout):
            func(input._local, *args, **kwargs)
            input._layout = permuted(layout, order)
        else:  # boxes and ranges have no other order of dims
            warn_of_gather(func, input.numel() * input.element_size())
            input._local = new(input.full_tensor(), *args, **kwargs)
            input._layout = replicated(tuple(input._local.shape), input._group.ranks)
        input._spec = None
        input._placements = None
        input._sync_body()
        return input

    return handler


for name in ("t", "transpose", "swapaxes", "swapdims"):
    in_place, view = getattr(torch.Tensor, f"{name}_"), getattr(torch.Tensor, name)
    HANDLERS[in_place] = _turns(in_place, view)
