"""``F.linear`` on sharded weights: ``b k, n k, n -> b n``.

Column-parallel (n cut): a plain input meets cut values, so its gradient is summed over the ranks; the gradient of a
plain bias is known only in pieces. Both travel in one all-reduce, started before the weight's gradient is computed and
awaited after. Row-parallel (k cut): products are addends, summed at once; the bias is added after, once.

References:
    Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3, for the two ways to cut a product.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.layout.layout import CutLayout
from shardtensor.ops.by_rule import by_rule
from shardtensor.rules.propagate import with_dims
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap
from shardtensor.tensor.teams import along


@implements(F.linear)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``input @ weight.T + bias``, any of them sharded. Global shapes ``(..., k), (n, k), (n,) -> (..., n)``."""
    if weight.dim() == 2 and _is_column_parallel(input, weight, bias):
        return _column_parallel(input, weight, bias)  # type: ignore[arg-type]
    return _by_rule(input, weight, bias)


_by_rule = by_rule(F.linear, "linear")


def _is_column_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether this is a plain input and a plain bias on a weight cut along its rows, each rank one stretch of them."""
    if isinstance(x, ShardedTensor) or not isinstance(weight, ShardedTensor) or isinstance(bias, ShardedTensor):
        return False
    layout = weight._layout
    return (
        isinstance(layout, CutLayout)
        and not layout.partial
        and layout.cut_dims == (0,)
        and not layout.is_blocked(0)
        and x.dim() > 0
        and x.shape[-1] == weight.shape[-1]
        and (x.requires_grad or bias is not None)  # else there is no gradient to sum, and the rule is all there is
    )


def _column_parallel(x: torch.Tensor, weight: ShardedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    layout, group = weight._layout, weight._group
    assert isinstance(layout, CutLayout)
    cut = layout.dims[0]
    assert cut is not None
    start = layout.start(group.rank, 0)
    local = weight._local
    # Inside the Function autocast would differ between the two passes.
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, local = x.to(dtype), local.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    team = along(group, layout, cut.axes)
    y = ColumnLinear.apply(x, local, bias, team, start)
    shape = (*x.shape[:-1], layout.shape[0])
    dims = (*(None,) * (x.dim() - 1), cut)
    return wrap(y, with_dims(layout, shape, dims), None, group)


class ColumnLinear(torch.autograd.Function):
    """A product's columns on this rank: x ``(..., k)``, the whole bias ``(n,)``, weight ``(n_local, k)``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group, start: int
    ) -> torch.Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]  # of a frozen weight the input is not kept, nor watched
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        ctx.group, ctx.start, ctx.shape = group, start, x.shape
        ctx.n = None if bias is None else bias.numel()
        return F.linear(x, weight, None if bias is None else bias[start : start + weight.shape[0]])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, k, here = math.prod(ctx.shape[:-1]), ctx.shape[-1], grad.shape[-1]
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad = grad.reshape(rows, here)
        flat_x: Any = x.reshape(rows, k) if wants_weight else None
        n = ctx.n if wants_bias else 0
        if not (wants_x or wants_bias):
            return None, grad.t() @ flat_x if wants_weight else None, None, None, None
        if torch.is_grad_enabled():  # gradients of gradients are wanted: the same sums, recorded
            terms = [(grad @ weight).reshape(-1)] if wants_x else []
            terms += [F.pad(grad.sum(0), (ctx.start, n - ctx.start - here))] if wants_bias else []
            total = collectives.all_reduce(torch.cat(terms), ctx.group)
            # the input is a copy that meets this rank's rows
            grad_weight = grad.t() @ collectives.sum_gradient(flat_x, ctx.group) if wants_weight else None
        else:
            total = grad.new_empty(rows * k * wants_x + n)
            if wants_x:
                torch.mm(grad, weight, out=total[: rows * k].view(rows, k))
            if wants_bias:
                tail = total[total.numel() - n :].zero_()
                torch.sum(grad, 0, out=tail[ctx.start : ctx.start + here])
            pending = ctx.group.all_reduce_async(total)
            grad_weight = grad.t() @ flat_x if wants_weight else None  # beside the all-reduce
            total = pending.wait()
        grad_x = total[: rows * k].view(ctx.shape) if wants_x else None
        return grad_x, grad_weight, total[total.numel() - n :] if wants_bias else None, None, None
