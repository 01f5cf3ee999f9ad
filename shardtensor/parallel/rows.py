"""Rows of a tensor in another order, with gradients that pick rows and never add them up one by one."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch.autograd import Function


@attrs.frozen(eq=False)
class Order:
    """Rows in another order: row i of the result is row ``indices[i]``; ``inverse`` leads back."""

    indices: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def sorting(cls, keys: torch.Tensor) -> Order:
        """By key; rows of one key stay as they stand."""
        indices = keys.argsort(stable=True)
        places = torch.arange(len(indices), device=indices.device)
        return cls(indices, torch.empty_like(indices).scatter_(0, indices, places))

    def back(self) -> Order:
        return Order(self.inverse, self.indices)


class Reorder(Function):
    """Rows in another order; the adjoint is the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.order = order
        return x.index_select(0, order.indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Reorder.apply(grad, ctx.order.back()), None


class Spread(Function):
    """`copies` of each row, reordered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: Order, copies: int) -> torch.Tensor:
        ctx.order, ctx.shape = order, (x.shape[0], copies, x.shape[1])
        return x.index_select(0, order.indices.div(copies, rounding_mode="floor") if copies > 1 else order.indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Reorder.apply(grad, ctx.order.back()).view(ctx.shape).sum(1), None, None
