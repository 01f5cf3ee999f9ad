"""Collectives with gradients, each beside its adjoint.

The convention: a plain tensor is a *copy*, equal on every rank, and its gradient is a copy too; a *partial* has a
different value on every rank and stands for their sum, and so does a tensor whose gradients are partial; a *part* is
this rank's own piece of the elements. Each pair below is closed: either is the other's backward, so gradients of
gradients come out right.

    ======================  ==================  =========================  ==================
    forward                 from -> to          backward                   pair
    ======================  ==================  =========================  ==================
    sum_gradient            copy -> partial     all_reduce                 *f* and *g*
    all_reduce              partial -> copy     sum_gradient
    take                    copy -> part        all_gather
    all_gather              part -> copy        take
    all_gather_sum_gradient part -> partial     reduce_scatter             sequence parallelism
    reduce_scatter          partial -> part     all_gather_sum_gradient
    all_to_all              part -> part        all_to_all, the way back
    ======================  ==================  =========================  ==================

Every member of the group calls them, in the same order, and runs the backward of as many; where nothing asks for a
gradient no graph is made. In a group of one each returns its argument. Counts are elements of each member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from shardtensor.comm.function_call import caller, refuse_forward_mode
from shardtensor.comm.group import Group

Counts = Sequence[int]


def differentiates(x: torch.Tensor) -> bool:
    """Whether autograd records what is done with `x`.

    Raises:
        RuleError: forward mode is active, whose tangents would be lost: on all ranks, whatever they hold.
    """
    refuse_forward_mode()
    return x.requires_grad and torch.is_grad_enabled()


# -- copy and partial ------------------------------------------------------------------------------------------------


def sum_gradient(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`; sum its gradient over the group. Put where a copy meets work that is split over the ranks.

    Args:
        x: any shape, equal on every rank.
        group: the ranks among which the work is split.

    Returns:
        `x`, for use by this rank's share of the work; `all_reduce` is the adjoint. A leaf's gradient is summed in its
        ``grad_dtype``, that of a fully sharded parameter in the ``reduce_dtype``.

    References:
        *f* of Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; `all_reduce` is its *g*.
    """
    if group.size == 1 or not differentiates(x):
        return x
    return _do_sum_gradient(x, group)


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of `x` over the group, in a new tensor; leave its gradient as it is.

    Args:
        x: any shape, this rank's term of the sum.
        group: the ranks that hold the terms.

    Returns:
        the sum, in the shape of `x`, equal on every rank; `sum_gradient` is the adjoint.
    """
    if group.size == 1:
        return x
    return _do_all_reduce(x, group) if differentiates(x) else _sum(x, group)


def all_reduce_fresh(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`all_reduce` of what nobody else uses, such as a product: the sum takes its memory, and nothing is copied."""
    if group.size == 1:
        return x
    if differentiates(x):
        return _do_all_reduce_fresh(x, group)
    return group.all_reduce(x.contiguous())


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    return group.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))


def alias(result: torch.Tensor) -> torch.Tensor:
    """The same bytes in another tensor, for the graph to hang on.

    A backend's thread may let go of what it moved a moment after the wait for it is over; were that the very tensor
    that the graph gives out, the graph, and every parameter in it, would live on as long.
    """
    return result if torch.compiler.is_compiling() else result.detach()


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
    """What a Function's backward is to add the gradients of its first input up in: it may be wider than the input."""
    if dtype.itemsize > 2 or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return dtype
    node, number = ctx.next_functions[0]
    if hasattr(node, "variable"):  # a leaf's
        return getattr(node.variable, "grad_dtype", None) or dtype
    found: torch.dtype = node._input_metadata[number].dtype
    return found


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return alias(_sum(x, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_gradient(whole_gradient(grad), ctx.group), None


class _AllReduceFresh(_AllReduce):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return alias(group.all_reduce(x.detach().contiguous()))


# -- copy and part ---------------------------------------------------------------------------------------------------


def take(x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
    """Return this rank's range of the elements of `x`, flat. Sends nothing forward, gathers the gradients backward.

    Args:
        x: any shape, equal on every rank, of ``sum(counts)`` elements in row-major order.
        counts: elements of each member.
        group: the ranks that take a part each.

    Returns:
        ``counts[group.index]`` elements, a view where `x` is contiguous; `all_gather` is the adjoint.
    """
    if group.size == 1:
        return x.reshape(-1)
    return _do_take(x, counts, group) if differentiates(x) else _part(x, counts, group.index)


def all_gather(x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
    """Return the elements of all members, flat, in group order; the gradient of `x` is its range of the result's.

    Args:
        x: any shape, of ``counts[group.index]`` elements.
        counts: elements of each member; zeros and unequal ones are fine.
        group: the ranks that bring a part each.

    Returns:
        ``sum(counts)`` elements, equal on every rank; `take` is the adjoint.
    """
    if group.size == 1:
        return x.reshape(-1)
    return _do_all_gather(x, counts, group) if differentiates(x) else group.all_gather(x, counts)


def _part(x: torch.Tensor, counts: Counts, index: int) -> torch.Tensor:
    return x.reshape(-1).narrow(0, sum(counts[:index]), counts[index])


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
        ctx.shape, ctx.counts, ctx.group = x.shape, counts, group
        return _part(x, counts, group.index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.counts, ctx.group).view(ctx.shape), None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
        ctx.shape, ctx.counts, ctx.group = x.shape, counts, group
        return alias(group.all_gather(x, counts))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return take(whole_gradient(grad), ctx.counts, ctx.group).view(ctx.shape), None, None


def whole_gradient(grad: Any) -> torch.Tensor:
    """The gradient of a plain result, for which a program may give a ShardedTensor: ``y.backward(sharded)``.

    Torch hands it over as it is. A collective of its slices would not be the same on all ranks.
    """
    return grad if type(grad) is torch.Tensor or not hasattr(grad, "full_tensor") else grad.full_tensor()


# -- part and partial ------------------------------------------------------------------------------------------------


def all_gather_sum_gradient(x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
    """`all_gather` for work that is split over the ranks: the gradients of all ranks are summed and scattered.

    The same as `sum_gradient` of `all_gather`, at half the backward's traffic.

    Args:
        x: any shape, of ``counts[group.index]`` elements.
        counts: elements of each member.
        group: the ranks that bring a part each and split the work.

    Returns:
        ``sum(counts)`` elements, flat; `reduce_scatter` is the adjoint.
    """
    if group.size == 1:
        return x.reshape(-1)
    return _do_all_gather_sum_gradient(x, counts, group) if differentiates(x) else group.all_gather(x, counts)


def reduce_scatter(x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
    """Sum `x` over the group and return this rank's range of the sum, flat; gather the gradients backward.

    Args:
        x: any shape, of ``sum(counts)`` elements: this rank's term of the sum.
        counts: elements of each member.
        group: the ranks that hold the terms.

    Returns:
        ``counts[group.index]`` elements; `all_gather_sum_gradient` is the adjoint.
    """
    if group.size == 1:
        return x.reshape(-1)
    return _do_reduce_scatter(x, counts, group) if differentiates(x) else group.reduce_scatter(x, counts)


class _AllGatherSumGradient(_AllGather):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(grad, ctx.counts, ctx.group).view(ctx.shape), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Counts, group: Group) -> torch.Tensor:
        ctx.shape, ctx.counts, ctx.group = x.shape, counts, group
        return alias(group.reduce_scatter(x, counts))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_sum_gradient(grad, ctx.counts, ctx.group).view(ctx.shape), None, None


# -- part and part ---------------------------------------------------------------------------------------------------


def all_to_all(x: torch.Tensor, send_counts: Counts, recv_counts: Counts, group: Group) -> torch.Tensor:
    """Send consecutive ranges of `x` to the members; return what they sent here, flat, in group order.

    Args:
        x: any shape, of ``sum(send_counts)`` elements.
        send_counts: elements that go to each member.
        recv_counts: elements that come from each member.
        group: the ranks that exchange.

    Returns:
        ``sum(recv_counts)`` elements; the adjoint sends each of them back.
    """
    if group.size == 1:
        return x.reshape(-1)
    if differentiates(x):
        return _do_all_to_all(x, send_counts, recv_counts, group)
    return group.all_to_all(x, send_counts, recv_counts)


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, send_counts: Counts, recv_counts: Counts, group: Group) -> torch.Tensor:
        ctx.shape, ctx.send_counts, ctx.recv_counts, ctx.group = x.shape, send_counts, recv_counts, group
        return alias(group.all_to_all(x, send_counts, recv_counts))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = all_to_all(grad, ctx.recv_counts, ctx.send_counts, ctx.group)
        return back.view(ctx.shape), None, None, None


_do_sum_gradient, _do_all_reduce = caller(_SumGradient), caller(_AllReduce)
_do_all_reduce_fresh = caller(_AllReduceFresh)
_do_take, _do_all_gather = caller(_Take), caller(_AllGather)
_do_all_gather_sum_gradient, _do_reduce_scatter = caller(_AllGatherSumGradient), caller(_ReduceScatter)
_do_all_to_all = caller(_AllToAll)
