"""Collectives with gradients, each next to its adjoint.

A *replicated* tensor is equal on every rank, and so is its gradient. A *partial* tensor has a different value on each
rank, and its value is their sum. A *shard* is this rank's range of the elements. In each pair below one function is
the backward of the other, so gradients of gradients are right.

    ======================= ======================== ========================= ====================
    forward                 from -> to               backward                  use
    ======================= ======================== ========================= ====================
    sum_gradient            replicated -> partial    all_reduce                *f* and *g*
    all_reduce              partial -> replicated    sum_gradient
    all_to_all              shard -> shard           all_to_all
    ======================= ======================== ========================= ====================

`with_adjoint` makes a pair of any two functions without gradients; `redistribute` has those that gather and slice.

Every member of the group calls them, in the same order, and runs their backwards. If no gradient is needed, they
record no graph. In a group of one each returns its argument. Counts are numbers of elements, one for each member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from shardtensor.comm.group import Counts, Group
from shardtensor.errors import RuleError

Run = Callable[..., torch.Tensor]
_is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def caller(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for plain tensors (no ShardedTensors), in 3 microseconds instead of 5. It skips the
    checks of torch's Python layer, except under torch.compile and inside the transforms of torch.func."""
    plain: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        return plain(*args)

    return call


FORWARD_MODE_FIX = [
    "unshard_module(module), or full_tensor(), and differentiate the function of plain tensors",
    "torch.autograd.functional.jvp differentiates backward twice and takes sharded parameters",
]


def refuse_forward_mode() -> None:
    """Raise on all ranks if forward-mode differentiation is active: a collective does not send tangents."""
    if forward_ad._current_level >= 0:
        raise RuleError(
            "forward-mode differentiation does not see through ShardedTensors: a collective would lose the tangents",
            fix=FORWARD_MODE_FIX,
        )


def differentiates(x: torch.Tensor) -> bool:
    """Whether autograd records operations on `x`.

    Raises:
        RuleError: forward mode is active: a collective would lose its tangents. All ranks raise.
    """
    refuse_forward_mode()
    return x.requires_grad and torch.is_grad_enabled()


def sum_gradient(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, which is equal on every rank; sum its gradient over the group, whose ranks share the work on it.

    The gradient of a leaf is summed in its ``grad_dtype``, that of a fully sharded parameter in the ``reduce_dtype``.
    It is *f* of Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; the adjoint `all_reduce` is its *g*.
    """
    if group.size == 1 or not differentiates(x):
        return x
    return _do_sum_gradient(x, group)


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the group of the terms `x`, in a new tensor of its shape, equal on every rank. Backward
    passes the gradient on unchanged: `sum_gradient` is the adjoint."""
    if group.size == 1:
        return x
    return _do_all_reduce(x, group, _sum) if differentiates(x) else _sum(x, group)


def all_reduce_fresh(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Run `all_reduce` in place, for an `x` that is used nowhere else, such as the result of a matmul."""
    if group.size == 1:
        return x
    return _do_all_reduce(x, group, _sum_in_place) if differentiates(x) else _sum_in_place(x, group)


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    return group.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _sum_in_place(x: torch.Tensor, group: Group) -> torch.Tensor:
    return group.all_reduce(x.contiguous())


def alias(result: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same memory, for an autograd Function to return.

    A backend's thread may hold the tensor of a collective for a moment after the wait. If autograd attached the graph
    to that tensor, the graph and every parameter in it would live as long.
    """
    return result if torch.compiler.is_compiling() else result.detach()


def with_adjoint(x: torch.Tensor, run: Run, back: Run, *how: Any) -> torch.Tensor:
    """Return ``run(x, *how)``; backward returns ``back(gradient, *how)``, and the backward of that is `run` again.

    Both are linear functions of a local tensor without gradients of their own, each the adjoint of the other.
    """
    return _redistribute(x, (run, back, how)) if differentiates(x) else run(x, *how)


class _Redistribute(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: tuple[Run, Run, tuple[Any, ...]]) -> torch.Tensor:
        ctx.call, ctx.shape = call, x.shape
        run, _, how = call
        held = alias(x)  # a backend's thread may hold it for a moment, and must not hold the graph
        out = run(held, *how)
        if out is held:
            return x.view_as(x)
        # autograd refuses writes into a view that a Function returns: right for a slice, not for a result of its own
        return out if torch.compiler.is_compiling() or _is_alias_of(out, x) else out.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        run, back, how = ctx.call
        grad = with_adjoint(whole_gradient(grad), back, run, *how)
        if torch.compiler.is_compiling() or grad.shape != ctx.shape:  # an empty local tensor may have any shape
            grad = grad.reshape(ctx.shape)
        return grad, None


class _SumGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        dtype = dtype_of_gradient(ctx, grad.dtype)
        return all_reduce(grad, ctx.group) if dtype == grad.dtype else all_reduce_fresh(grad.to(dtype), ctx.group), None


def dtype_of_gradient(ctx: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a backward sums the gradient of its first input; it may be wider than the input's."""
    if dtype.itemsize > 2 or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return dtype
    node, number = ctx.next_functions[0]
    if hasattr(node, "variable"):  # the input is a leaf
        return getattr(node.variable, "grad_dtype", None) or dtype
    found: torch.dtype = node._input_metadata[number].dtype
    return found


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, run: Run) -> torch.Tensor:
        ctx.group = group
        return alias(run(x.detach(), group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return sum_gradient(whole_gradient(grad), ctx.group), None, None


def whole_gradient(grad: Any) -> torch.Tensor:
    """Return a gradient as a plain tensor: a program may call ``y.backward(sharded)`` for a plain `y`. The members
    of a group must compute with the same values, so a ShardedTensor is gathered."""
    return grad if type(grad) is torch.Tensor or not hasattr(grad, "full_tensor") else grad.full_tensor()


def all_to_all(x: torch.Tensor, send_counts: Counts, recv_counts: Counts, group: Group) -> torch.Tensor:
    """Send consecutive ranges of `x` to the members; return the ranges received, flat, in group order. Counts are
    the elements sent to and received from each member. Backward sends the gradient of each range back."""
    if group.size == 1:
        return x.reshape(-1)
    return with_adjoint(x, _exchange, _return, send_counts, recv_counts, group)


def _exchange(x: torch.Tensor, send_counts: Counts, recv_counts: Counts, group: Group) -> torch.Tensor:
    return group.all_to_all(x, send_counts, recv_counts)


def _return(x: torch.Tensor, send_counts: Counts, recv_counts: Counts, group: Group) -> torch.Tensor:
    return group.all_to_all(x, recv_counts, send_counts)


_do_sum_gradient, _do_all_reduce = caller(_SumGradient), caller(_AllReduce)
_redistribute = caller(_Redistribute)
