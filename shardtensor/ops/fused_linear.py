"""A product on this rank's part of a weight, fused with its one collective.

Column-parallel: the input's gradient is summed over the ranks beside the weight's gradient. Row-parallel: the products
are summed. Where the stream between products is cut along a dim (sequence parallelism), its stretches are gathered
before, and the gradients' sums scattered.

References:
    Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Korthikanti et al. (arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm import along_dim, collectives
from shardtensor.comm.along_dim import DimSizes
from shardtensor.comm.collectives import alias
from shardtensor.comm.group import Group
from shardtensor.errors import RuleError


def cast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operands as autocast wants them; inside of a Function it would differ between the two passes."""
    if not torch._C._is_any_autocast_enabled() or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


BESIDE_BYTES = 16 << 20
"""From this size on a sum runs beside the next product; below, to hand it over costs the host more than that saves."""


def is_large(x: torch.Tensor) -> bool:
    """Whether a sum of `x` is worth a stream, or on the CPU a thread, of its own."""
    return x.nbytes >= BESIDE_BYTES


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``(..., k)`` as ``(rows, k)``."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight ``(n, k)``: grad ``(..., n)``, x ``(..., k)``."""
    return as_rows(grad).t() @ as_rows(x)


def _refuse_second_order(x_shape: Any) -> None:
    if torch.is_grad_enabled():
        raise RuleError(
            "gradients of gradients through a stream that is cut are not recorded for large inputs",
            {"input": " x ".join(map(str, x_shape))},
            [
                "let the stream be `replicate` in the plan: its layers record them",
                f"give each rank less than {BESIDE_BYTES >> 20} MiB at a time: such inputs record them",
            ],
        )


class ColumnLinear(torch.autograd.Function):
    """A product's columns on this rank: x ``(..., k)``, weight ``(n_local, k)``.

    The bias is the whole ``(n,)``, of which this rank uses the stretch from `start` on and whose gradient travels with
    the input's; or, where `start` is None, this rank's part ``(n_local,)``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group, start: int | None
    ) -> torch.Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]  # of a frozen weight the input is not kept, nor watched
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        ctx.group, ctx.start, ctx.shape = group, start, x.shape
        ctx.n = 0 if bias is None or start is None else bias.numel()
        if bias is not None and start is not None:
            bias = bias[start : start + weight.shape[0]]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if wants_x and not (wants_bias and ctx.n) and not torch.is_grad_enabled():  # the usual case, at least cost
            grad_x = grad @ weight
            pending = ctx.group.all_reduce_async(grad_x) if is_large(grad_x) else None
            grad_weight = of_weight(grad, x) if wants_weight else None  # beside the all-reduce
            grad_bias = as_rows(grad).sum(0) if wants_bias else None
            grad_x = ctx.group.all_reduce(grad_x) if pending is None else pending.wait()
            return grad_x, grad_weight, grad_bias, None, None
        rows, k, here = math.prod(ctx.shape[:-1]), ctx.shape[-1], grad.shape[-1]
        grad = grad.reshape(rows, here)
        flat_x: Any = x.reshape(rows, k) if wants_weight else None
        own_bias = grad.sum(0) if wants_bias and ctx.start is None else None
        n = ctx.n if wants_bias else 0
        if not (wants_x or n):
            return None, grad.t() @ flat_x if wants_weight else None, own_bias, None, None
        if torch.is_grad_enabled():  # gradients of gradients are wanted: the same sums, recorded
            terms = [(grad @ weight).reshape(-1)] if wants_x else []
            terms += [F.pad(grad.sum(0), (ctx.start, n - ctx.start - here))] if n else []
            total = collectives.all_reduce(torch.cat(terms), ctx.group)
            # the input is a copy that meets this rank's rows
            grad_weight = grad.t() @ collectives.sum_gradient(flat_x, ctx.group) if wants_weight else None
        else:
            total = grad.new_empty(rows * k * wants_x + n)
            if wants_x:
                torch.mm(grad, weight, out=total[: rows * k].view(rows, k))
            tail = total[total.numel() - n :].zero_()
            torch.sum(grad, 0, out=tail[ctx.start : ctx.start + here])
            pending = ctx.group.all_reduce_async(total)
            grad_weight = grad.t() @ flat_x if wants_weight else None  # beside the all-reduce
            total = pending.wait()
        grad_x = total[: rows * k].view(ctx.shape) if wants_x else None
        return grad_x, grad_weight, total[total.numel() - n :] if n else own_bias, None, None


class GatheredColumnLinear(torch.autograd.Function):
    """`ColumnLinear` of a stream: x is this rank's stretch of dim `stream.dim`, the bias this rank's part.

    The whole input is kept for backward, so that the stretches are gathered once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group, stream: DimSizes
    ) -> torch.Tensor:
        ctx.shape = x.shape
        x = along_dim.all_gather_no_grad(x, stream, group)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        ctx.group, ctx.stream = group, stream
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _refuse_second_order(ctx.shape)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        started = along_dim.PendingReduceScatter(grad @ weight, ctx.stream, ctx.group) if wants_x else None
        grad_weight = of_weight(grad, x) if wants_weight else None  # beside the reduce-scatter
        grad_bias = as_rows(grad).sum(0) if wants_bias else None
        return None if started is None else started.wait(), grad_weight, grad_bias, None, None


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
        grad_weight = of_weight(terms, x) if wants_weight else None
        grad_bias = as_rows(grad).sum(0) if wants_bias else None
        return terms @ weight if wants_x else None, grad_weight, grad_bias, None


class ChunkedRowLinear(torch.autograd.Function):
    """`RowLinear` without a bias, in chunks of rows: one chunk is summed while the next is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: Group, chunks: int) -> torch.Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        ctx.group = group
        out = x.new_empty(math.prod(x.shape[:-1]), weight.shape[0])
        pending = []
        for part, into in zip(as_rows(x).chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(part, weight.t(), out=into)
            pending.append(group.all_reduce_async(into))
        for each in pending:
            each.wait()
        return alias(out).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *RowLinear.backward(ctx, grad)[:2], None, None
