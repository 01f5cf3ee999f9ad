"""Tensor parallelism as people write it by hand: autograd functions around local products, one collective each.

Shared by the benchmarks; `spmd_types` is the same by the typed collectives of ``pip install spmd-types``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Around = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""What is called before the first product and after the second."""


class Copied(torch.autograd.Function):
    """Nothing forward; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """The sum over the ranks forward; nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _gathered(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def _scattered(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


class Gathered(torch.autograd.Function):
    """Tokens gathered forward; the gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _scattered(grad)


class Scattered(torch.autograd.Function):
    """Summed and scattered forward; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _scattered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _gathered(grad)


def spmd_types(is_stream: bool) -> Around | None:
    """The same by spmd-types; None where it is not installed."""
    try:
        import spmd_types as spmd
    except ImportError:
        return None
    ranks = dist.group.WORLD

    def back(x: torch.Tensor) -> dict[str, Any]:  # gradients are summed in the dtype that they have, as the others do
        return {"backward_options": {"op_dtype": x.dtype}}

    if is_stream:
        return (
            lambda x: spmd.all_gather(x, ranks, src=spmd.V, dst=spmd.R, gather_dim=0, **back(x)),
            lambda x: spmd.reduce_scatter(x, ranks, src=spmd.P, dst=spmd.V, scatter_dim=0),
        )
    return (
        lambda x: spmd.invariant_to_replicate(x, ranks, **back(x)),
        lambda x: spmd.all_reduce(x, ranks, src=spmd.P, dst=spmd.I, inplace=True),
    )
