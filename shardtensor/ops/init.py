"""torch.nn.init on ShardedTensors: the dense numbers, from the global fan, drawn in parts.

Four functions ask a tensor's class to do their work: ``uniform_``, ``normal_``, ``constant_``, ``kaiming_uniform_``.
Their own body is run here on a stand-in that does not ask again, so that every rank computes torch's bound from the
global shape. The others (``xavier_*``, ``trunc_normal_``, ``orthogonal_``, ...) run their body on the ShardedTensor as
it is and need the operations in it, `torch.eye` into a given tensor among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import init

from shardtensor.ops.random import assign, refuse_leaf
from shardtensor.tensor.copied import refuse_lost_write
from shardtensor.tensor.dispatch import HANDLERS, implements
from shardtensor.tensor.sharded_tensor import ShardedTensor

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
