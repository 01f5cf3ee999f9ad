"""Fast calls of autograd Functions on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from shardtensor.errors import RuleError


def caller(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for plain tensors (no ShardedTensors), in 3 microseconds instead of 5.

    It skips the checks of torch's Python layer, except under torch.compile and inside the transforms of torch.func.
    """
    plain: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        return plain(*args)

    return call


def refuse_forward_mode() -> None:
    """Raise, on all ranks alike, if forward-mode differentiation is active: a collective does not send tangents."""
    if forward_ad._current_level >= 0:
        raise RuleError(
            "forward-mode differentiation does not see through ShardedTensors: a collective would lose the tangents",
            fix=[
                "unshard_module(module), or full_tensor(), and differentiate the function of plain tensors",
                "torch.autograd.functional.jvp differentiates backward twice and takes sharded parameters",
            ],
        )
