"""``out=``: compute, then write the result into a tensor that is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.errors import RuleError
from shardtensor.tensor.dispatch import name_of
from shardtensor.tensor.sharded_tensor import ShardedTensor


def write_out(compute: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return ``out`` with the values of ``compute(func, args, kwargs)``, of its own layout.

    Raises:
        RuleError: `out` is sharded and has another shape; torch would resize it.
        RuntimeError: as torch: an operand requires a gradient, or the dtype of the result does not fit.
    """
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    values = [*args, *kwargs.values(), out]
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in values):
        raise RuntimeError(
            f"{name_of(func)}(): functions with out=... arguments don't support automatic differentiation, but one of "
            "the arguments requires grad."
        )
    result = (
        compute(func, args, kwargs) if any(isinstance(x, ShardedTensor) for x in values[:-1]) else func(*args, **kwargs)
    )
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype}")
    if out.shape != result.shape:
        if isinstance(out, ShardedTensor) or out.numel():
            raise RuleError(
                f"{name_of(func)}: out has another shape than the result",
                {"out": tuple(out.shape), "result": tuple(result.shape)},
                "make out of the shape of the result",
            )
        out.resize_(result.shape)
    with torch.no_grad():
        return out.copy_(
            result.full_tensor() if isinstance(result, ShardedTensor) and not isinstance(out, ShardedTensor) else result
        )
