"""Calls of autograd Functions on plain tensors, without what torch's Python does around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def caller(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for plain tensors at 3 microseconds instead of 5.

    Under torch.compile, and inside the transforms of torch.func, it is ``function.apply``. Arguments are never
    ShardedTensors here.
    """
    plain: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        return plain(*args)

    return call
