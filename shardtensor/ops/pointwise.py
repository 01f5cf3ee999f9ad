"""Elementwise operations, with broadcasting."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.ops.engine import run
from shardtensor.rules.rule import pointwise
from shardtensor.tensor.dispatch import HANDLERS, fall_back, spellings
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap

UNARY = "neg exp log relu gelu silu sigmoid tanh sqrt rsqrt abs square sin cos reciprocal".split()
BINARY = "add sub mul div true_divide pow maximum minimum".split()


def elementwise(func: Any) -> Any:
    def handler(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            x = settled(args[0])
            return wrap(func(x._local), x._layout, None, x._group)
        places = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
        tensors = [args[i] for i in places]
        shapes = tuple(tuple(t.shape) for t in tensors)
        shape = tuple(torch.broadcast_shapes(*shapes))

        def compute(*locals_: torch.Tensor) -> torch.Tensor:
            filled = list(args)
            for i, local in zip(places, locals_, strict=True):
                filled[i] = local
            return func(*filled, **kwargs)

        out = run(getattr(func, "__name__", str(func)), pointwise(shapes, shape), tensors, compute)
        return fall_back(func, args, kwargs) if out is None else out

    return handler


for name in UNARY + BINARY:
    for func in spellings(name):
        HANDLERS[func] = elementwise(func)

__all__ = ["ShardedTensor", "elementwise"]
