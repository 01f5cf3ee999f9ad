"""Products with sharded weights, fused with their collectives, ``F.linear`` on them: ``b k, n k, n -> b n``; einsum.

Column-parallel (n is sharded): each rank multiplies a replicated input, so the input's gradient is summed over the
ranks, while the weight's gradient is computed; each rank has a slice of the gradient of a replicated bias, and one
all-reduce sums both. Row-parallel (k is sharded): the products are partial and summed at once; the bias is added after,
once. If the activations between layers are sharded along a dim (a *stream*, sequence parallelism), the slices of the
input are gathered before, and its gradient is reduce-scattered.

Several products may read one input and share its collective. A product of torch's returns both of its gradients at
once, so the input's, summed over the products, is complete only when all of the weights' are. So `share` returns a
*proxy* of the input for each product, through which backward returns the product's gradient: one node of the graph
gets them all, and runs the collective beside the weights' gradients. Under torch.compile, which orders the work itself,
products are ordinary ones; ``torch.compile(module, options={"reorder_for_compute_comm_overlap": True,
"reorder_for_compute_comm_overlap_passes": ["sink_waits"]})`` hides the same collective.

References:
    Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Korthikanti et al. (arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.comm.collectives import alias, caller
from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import Move, along, start_summed_gradient, summed_gradient
from shardtensor.layout.layout import MeshLayout
from shardtensor.ops.by_rule import by_rule, local_call_by_rule
from shardtensor.ops.engine import chosen_sharding
from shardtensor.ops.local_call import LocalCall, cached_call, local_by, on_empty, run_as
from shardtensor.rules.propagate import with_dims
from shardtensor.rules.rule import einsum_rule
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor


def cast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Cast the operands as autocast does; inside a Function the two passes would differ."""
    if not torch._C._is_any_autocast_enabled() or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


BESIDE_BYTES = 16 << 20
"""From this size on an all-reduce overlaps with the next product; below it, starting it costs the host more."""


def is_large(x: torch.Tensor) -> bool:
    """Return whether a sum of `x` is worth a separate stream, or on the CPU a thread."""
    return x.nbytes >= BESIDE_BYTES


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``(..., k)`` as ``(rows, k)``."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weight ``(n, k)``: grad ``(..., n)``, x ``(..., k)``."""
    return as_rows(grad).t() @ as_rows(x)


class ColumnLinear(torch.autograd.Function):
    """A product's columns on this rank: x ``(..., k)``, weight ``(n_local, k)``.

    The bias is replicated, ``(n,)``: this rank uses the slice from `start` on, and its gradient is summed with the
    input's; or, if `start` is None, it is this rank's part ``(n_local,)``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group, start: int | None
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]  # the input of a frozen weight is not saved
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.group, ctx.start, ctx.shape = group, start, x.shape
        ctx.n = 0 if bias is None or start is None else bias.numel()
        if bias is not None and start is not None:
            bias = bias[start : start + weight.shape[0]]
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_x and not (needs_bias and ctx.n) and not torch.is_grad_enabled():  # the usual case, at the least cost
            grad_x = grad @ weight
            pending = ctx.group.all_reduce_async(grad_x) if is_large(grad_x) else None
            grad_weight = of_weight(grad, x) if needs_weight else None  # beside the all-reduce
            grad_bias = as_rows(grad).sum(0) if needs_bias else None
            grad_x = ctx.group.all_reduce(grad_x) if pending is None else pending.wait()
            return grad_x, grad_weight, grad_bias, None, None
        rows, k, here = math.prod(ctx.shape[:-1]), ctx.shape[-1], grad.shape[-1]
        grad = grad.reshape(rows, here)
        flat_x: Any = x.reshape(rows, k) if needs_weight else None
        own_bias = grad.sum(0) if needs_bias and ctx.start is None else None
        n = ctx.n if needs_bias else 0
        if not (needs_x or n):
            return None, grad.t() @ flat_x if needs_weight else None, own_bias, None, None
        if torch.is_grad_enabled():  # for gradients of gradients: the same sums, recorded
            terms = [(grad @ weight).reshape(-1)] if needs_x else []
            terms += [F.pad(grad.sum(0), (ctx.start, n - ctx.start - here))] if n else []
            total = collectives.all_reduce(torch.cat(terms), ctx.group)
            # the input is replicated, and each rank multiplies it by its rows
            grad_weight = grad.t() @ collectives.sum_gradient(flat_x, ctx.group) if needs_weight else None
        else:
            total = grad.new_empty(rows * k * needs_x + n)
            if needs_x:
                torch.mm(grad, weight, out=total[: rows * k].view(rows, k))
            tail = total[total.numel() - n :].zero_()
            torch.sum(grad, 0, out=tail[ctx.start : ctx.start + here])
            pending = ctx.group.all_reduce_async(total)
            grad_weight = grad.t() @ flat_x if needs_weight else None  # beside the all-reduce
            total = pending.wait()
        grad_x = total[: rows * k].view(ctx.shape) if needs_x else None
        return grad_x, grad_weight, total[total.numel() - n :] if n else own_bias, None, None


class RowLinear(torch.autograd.Function):
    """The sum over ranks of products: x ``(..., k_local)``, weight ``(n, k_local)``; then the bias ``(n,)``, once."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Group
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.group = group
        total = group.all_reduce(F.linear(x, weight))
        return alias(total if bias is None else total.add_(bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        terms = collectives.sum_gradient(grad, ctx.group) if torch.is_grad_enabled() else grad  # each rank uses it
        grad_weight = of_weight(terms, x) if needs_weight else None
        grad_bias = as_rows(grad).sum(0) if needs_bias else None
        return terms @ weight if needs_x else None, grad_weight, grad_bias, None


column_linear, row_linear = caller(ColumnLinear), caller(RowLinear)


# -- products that share their input's collective -------------------------------------------------------------------


class Shared(NamedTuple):
    """The products that share an input.

    Attributes:
        version: of the input when it was shared; after a write, products with it are ordinary ones.
        proxies: of the products, with their weights.
    """

    version: int
    proxies: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def share(x: torch.Tensor, weights: Sequence[torch.Tensor], move: Move) -> torch.Tensor:
    """Return the input of products that share its collective: `x`, or all slices of a stream; its gradient is summed.

    `shared_linear` of the result and one of the weights shares the collective; all other operations on it get the
    right gradient, too. All ranks of the group call this, and run backward.

    Args:
        x: ``(..., k)``, equal on all ranks; of a stream, this rank's slice of it. It requires a gradient.
        weights: ``(n_local, k)`` each, leaves that require gradients, of the dtype of `x`.
        move: sums the gradient of `x`; of a stream, it gathers the slices, too.
    """
    shared, *proxies = _share(x, move, *weights)
    shared.shared_by = Shared(shared._version, tuple(zip(weights, proxies, strict=True)))
    return shared


def gathered_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, move: Move) -> torch.Tensor:
    """Gather the slices of a stream and multiply; the gradient's reduce-scatter runs beside the weight's gradient."""
    if not weight.requires_grad:  # nothing to overlap with, and the input need not be saved
        return F.linear(move.call(x), weight, bias)
    full, proxy = _share(x, move, weight)
    return _linear(proxy, full, weight, bias)


def shared_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Run ``F.linear``; if `x` is shared by a product with this same weight, as that product.

    If the input or the weight was changed or cast, or is another one, it is an ordinary product.
    """
    shared: Shared | None = getattr(x, "shared_by", None)
    if shared is not None and not torch.compiler.is_compiling() and x._version == shared.version:
        for each, proxy in shared.proxies:
            if each is weight:
                return _linear(proxy, x, weight, bias)
    return F.linear(x, weight, bias)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: Move, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.move = move
        x = alias(move.call(x)) if move.step.kind == "all_gather" else x.view_as(x)
        ctx.save_for_backward(x, *weights)
        nothing = x.new_empty(())  # a proxy has a shape, and no memory
        return x, *(nothing.expand(*x.shape[:-1], weight.shape[0]) for weight in weights)

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor | None, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        none = [None] * len(grads)
        if all(grad is None for grad in grads):  # no product took part, or create_graph=True
            return None if grad_x is None else summed_gradient(grad_x, ctx.move), None, *none
        x, *weights = ctx.saved_tensors
        total: Any = None  # partial, in new memory
        for grad, weight in zip(grads, weights, strict=True):
            if grad is not None:
                total = as_rows(grad) @ weight if total is None else total.addmm_(as_rows(grad), weight)
        total = total.view(x.shape)
        if grad_x is not None:  # from other uses
            total += grad_x
        started = start_summed_gradient(total, ctx.move)
        of_weights = [None if grad is None else of_weight(grad, x) for grad in grads]  # beside the collective
        return started.wait(), None, *of_weights


class _Linear(torch.autograd.Function):
    """The product itself; backward passes its gradient through the proxy to `_Share`."""

    @staticmethod
    def forward(
        ctx: Any, proxy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_bias = as_rows(grad).sum(0) if ctx.needs_input_grad[3] else None
        if not torch.is_grad_enabled():
            return grad, None, None, grad_bias
        x, weight = ctx.saved_tensors  # create_graph=True: an ordinary product, which autograd records
        return None, grad @ weight, of_weight(grad, x), grad_bias


_share, _linear = caller(_Share), caller(_Linear)


# -- F.linear on ShardedTensors -------------------------------------------------------------------------------------


def _decide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """Return the product of local tensors with one collective; None if the rule of `linear` must decide."""
    x, weight, bias = (*args, None)[:3]
    if kwargs or isinstance(bias, ShardedTensor) or weight.dim() != 2:
        return None
    if _is_column_parallel(x, weight) and (bias is None or bias.shape == weight.shape[:1]):
        return _column_parallel(x, weight)
    if isinstance(x, ShardedTensor) and isinstance(x._layout, MeshLayout) and any(x._layout.dims[-1:]):
        return _row_parallel(x, weight, bias)
    return local_call_by_rule(F.linear, "linear", args, kwargs)


def _is_column_parallel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the input is plain and the weight sharded along its rows, one interval for each rank."""
    if isinstance(x, ShardedTensor) or not isinstance(weight, ShardedTensor):
        return False
    layout = weight._layout
    return (
        isinstance(layout, MeshLayout)
        and not layout.partial
        and layout.cut_dims == (0,)
        and not layout.is_blocked(0)
        and x.dim() > 0
        and x.shape[-1] == weight.shape[-1]
    )


def _column_parallel(x: torch.Tensor, weight: ShardedTensor) -> LocalCall:
    layout, group = weight._layout, weight._group
    assert isinstance(layout, MeshLayout)
    cut = layout.dims[0]
    assert cut is not None
    start = layout.start(group.rank, 0)
    subgroup = along(group, layout, cut.axes)

    def columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not x.requires_grad and (bias is None or not bias.requires_grad):  # nothing to sum: torch's own backward
            return F.linear(x, weight, None if bias is None else bias[start : start + weight.shape[0]])
        return column_linear(*cast(x, weight, bias), subgroup, start)

    dims = (*(None,) * (x.dim() - 1), cut)
    return LocalCall(columns, with_dims(layout, (*x.shape[:-1], layout.shape[0]), dims))


def _row_parallel(x: ShardedTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> LocalCall | None:
    """Return the `LocalCall` that sums partial products and then adds a plain bias, if every rank has the full sum."""
    layout = x._layout
    assert isinstance(layout, MeshLayout)
    cut = layout.dims[-1]
    found = local_call_by_rule(F.linear, "linear", (x, weight), {})
    if found is None or found.moves or cut is None:
        return None
    if bias is not None and (found.layout is not None or bias.shape != weight.shape[:1]):
        return None
    subgroup = along(x._group, layout, cut.axes)

    def rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x, weight, bias = cast(x, weight, bias)
        if bias is not None and bias.dtype != x.dtype:
            F.linear(x, weight, bias)  # torch's error
        return row_linear(x, weight, bias, subgroup)

    return found._replace(call=rows)


implements(F.linear)(cached_call(F.linear, _decide, by_rule(F.linear, "linear"), "linear"))


# -- torch.einsum ------------------------------------------------------------------------------------------------------


def einsum(*args: Any) -> torch.Tensor:
    """Run ``torch.einsum(equation, *operands)``. The form without an equation gathers."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    rule = einsum_rule(equation, tuple(tuple(x.shape) for x in operands)) if isinstance(equation, str) else None
    chosen = None if rule is None else chosen_sharding("einsum", rule, operands)
    if chosen is None:
        return fall_back(torch.einsum, args, {})
    return run_as(*chosen, operands, _summing(equation, operands))


def _einsum_locally(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    equation, *operands = args
    if not isinstance(equation, str) or not all(isinstance(x, torch.Tensor) for x in operands):
        return None
    rule = einsum_rule(equation, tuple(tuple(x.shape) for x in operands))
    chosen = None if rule is None else chosen_sharding("einsum", rule, operands, for_every_dtype=True)
    if chosen is None:
        return None
    compute, places = _summing(equation, operands), range(1, len(args))
    return local_by(on_empty(lambda _, *xs: compute(*xs), None, *chosen, places), *chosen, operands, places)


def _summing(equation: str, operands: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the local equation. Under autocast it has the global one's dtype: torch chooses by the sizes of dims."""
    kinds = tuple((tuple(min(n, 2) for n in x.shape), x.dtype) for x in operands)
    device = operands[0].device.type

    def compute(*xs: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(device):
            return torch.einsum(equation, *xs)
        dtype = _dtype_under_autocast(equation, kinds, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return torch.einsum(equation, *(x.to(dtype) if x.is_floating_point() else x for x in xs))

    return compute


@cache
def _dtype_under_autocast(equation: str, kinds: tuple[tuple[Any, torch.dtype], ...], low: torch.dtype) -> torch.dtype:
    """Return the dtype of an equation of operands of these sizes and dtypes: that of torch's result for zeros."""
    with torch.no_grad(), torch.autocast("cpu", low):
        zeros = (torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in kinds)
        return torch.einsum(equation, *zeros).dtype


implements(torch.einsum)(cached_call(torch.einsum, _einsum_locally, einsum))
