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
from shardtensor.comm.collectives import alias
from shardtensor.comm.group import Group
from shardtensor.layout.layout import CutLayout
from shardtensor.ops.by_rule import by_rule, decided
from shardtensor.ops.local_call import LocalCall, remembered
from shardtensor.rules.propagate import with_dims
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.sharded_tensor import ShardedTensor
from shardtensor.tensor.teams import along


def _decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """How to do a product on local tensors and one collective; None for the general way."""
    x, weight, bias = (*args, None)[:3]
    if kwargs or isinstance(bias, ShardedTensor) or weight.dim() != 2:
        return None
    if _is_column_parallel(x, weight) and (bias is None or bias.shape == weight.shape[:1]):
        return _column_parallel(x, weight)
    if isinstance(x, ShardedTensor) and isinstance(x._layout, CutLayout) and any(x._layout.dims[-1:]):
        return _row_parallel(x, weight, bias)
    return decided(F.linear, "linear", args, kwargs)


def _is_column_parallel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this is a plain input on a weight cut along its rows, each rank one stretch of them."""
    if isinstance(x, ShardedTensor) or not isinstance(weight, ShardedTensor):
        return False
    layout = weight._layout
    return (
        isinstance(layout, CutLayout)
        and not layout.partial
        and layout.cut_dims == (0,)
        and not layout.is_blocked(0)
        and x.dim() > 0
        and x.shape[-1] == weight.shape[-1]
    )


def _column_parallel(x: torch.Tensor, weight: ShardedTensor) -> LocalCall:
    layout, group = weight._layout, weight._group
    assert isinstance(layout, CutLayout)
    cut = layout.dims[0]
    assert cut is not None
    start = layout.start(group.rank, 0)
    team = along(group, layout, cut.axes)

    def columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ColumnLinear.apply(*_cast(x, weight, bias), team, start)

    dims = (*(None,) * (x.dim() - 1), cut)
    return LocalCall(columns, with_dims(layout, (*x.shape[:-1], layout.shape[0]), dims))


def _row_parallel(x: ShardedTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> LocalCall | None:
    """Addends, summed, and then a plain bias, where every rank has the whole sum."""
    layout = x._layout
    assert isinstance(layout, CutLayout)
    cut = layout.dims[-1]
    found = decided(F.linear, "linear", (x, weight), {})
    if found is None or cut is None:
        return None
    if bias is not None and (found.layout is not None or bias.shape != weight.shape[:1]):
        return None
    team = along(x._group, layout, cut.axes)

    def rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x, weight, bias = _cast(x, weight, bias)
        if bias is not None and bias.dtype != x.dtype:
            F.linear(x, weight, bias)  # torch's error
        return RowLinear.apply(x, weight, bias, team)

    return found._replace(call=rows)


def _cast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operands as autocast wants them; inside of a Function it would differ between the two passes."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


implements(F.linear)(remembered(F.linear, _decide, by_rule(F.linear, "linear"), "linear"))


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
            if wants_bias:
                total = grad.new_empty(rows * k * wants_x + n)
                if wants_x:
                    torch.mm(grad, weight, out=total[: rows * k].view(rows, k))
                tail = total[total.numel() - n :].zero_()
                torch.sum(grad, 0, out=tail[ctx.start : ctx.start + here])
            else:
                total = (grad @ weight).view(-1)
            pending = ctx.group.all_reduce_async(total)
            grad_weight = grad.t() @ flat_x if wants_weight else None  # beside the all-reduce
            total = pending.wait()
        grad_x = total[: rows * k].view(ctx.shape) if wants_x else None
        return grad_x, grad_weight, total[total.numel() - n :] if wants_bias else None, None, None


class RowLinear(torch.autograd.Function):
    """The sum over ranks of products: x ``(..., k_local)``, weight ``(n, k_local)``; then the bias ``(n,)``, once."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group
    ) -> torch.Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        ctx.group = group
        total = group.all_reduce(F.linear(x, weight))
        return alias(total if bias is None else total.add_(bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        terms = collectives.sum_gradient(grad, ctx.group) if torch.is_grad_enabled() else grad  # each rank uses it
        flat = terms.reshape(-1, grad.shape[-1])
        grad_weight = flat.t() @ x.reshape(-1, x.shape[-1]) if wants_weight else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if wants_bias else None
        return terms @ weight if wants_x else None, grad_weight, grad_bias, None
