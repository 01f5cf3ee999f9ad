"""All-gather and reduce-scatter along any dim; each member of a group holds a slice of it.

Forms with ``_no_grad`` are for autograd Functions that write their own backward; the others have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardtensor.comm import collectives
from shardtensor.comm.collectives import alias, caller
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError


class DimSizes(NamedTuple):
    """A dim, counted from the front, or from the end if negative, and the size of each group member's slice of it.
    None: computed from the length; if `balanced` they may differ by one, else an uneven length is an error."""

    dim: int
    sizes: tuple[int, ...] | None = None
    balanced: bool = False

    def of_full(self, x: torch.Tensor, group: Group) -> Sequence[int]:
        """Return the size of each member's slice, where `x` has the full dim."""
        if self.sizes is not None:
            return self.sizes
        each, left = divmod(x.shape[self.dim], group.size)
        if left and not self.balanced:
            raise LayoutError(
                f"{x.shape[self.dim]} elements of dim {self.dim} cannot be cut evenly over {group.size} ranks",
                {"value": " x ".join(map(str, x.shape))},
                ["write `balanced` after the axis in the flow", f"pad the value to a multiple of {group.size}"],
            )
        return [each + (i < left) for i in range(group.size)]

    def of_local(self, x: torch.Tensor, group: Group) -> Sequence[int]:
        """Return the size of each member's slice, where `x` is this member's; balanced sizes need a small exchange."""
        if self.sizes is not None:
            return self.sizes
        own = x.shape[self.dim]
        if not self.balanced:
            return [own] * group.size
        return [int.from_bytes(size, "little") for size in group.exchange(own.to_bytes(8, "little"))]

    def are_contiguous(self, shape: torch.Size) -> bool:
        """Whether the slices of a tensor of this shape, full or local, are consecutive in memory and of equal size."""
        return self.sizes is None and not self.balanced and (self.dim == 0 or (self.dim == 1 and shape[0] == 1))


def all_gather_no_grad(x: torch.Tensor, sizes: DimSizes, group: Group) -> torch.Tensor:
    """Return the concatenation of all members' slices along the dim. All members call it."""
    dim, shape = sizes.dim, x.shape
    if sizes.are_contiguous(shape):  # the usual case, without copies
        return group.all_gather(x).view(*shape[:dim], shape[dim] * group.size, *shape[dim + 1 :])
    return _all_gather(x, sizes, group, lambda first, counts: group.all_gather(first.reshape(-1), counts))


def all_gather(x: torch.Tensor, sizes: DimSizes, group: Group, sum_gradient: bool = False) -> torch.Tensor:
    """Run `all_gather_no_grad` with a gradient: this member's slice of the result's gradient. With `sum_gradient`, for
    work that is split over the group, backward sums the gradients of all members first."""
    if not _differentiates(x, group):
        return all_gather_no_grad(x, sizes, group)
    if sum_gradient:
        if sizes.balanced:  # exchange the sizes once: backward needs them too
            sizes = sizes._replace(sizes=tuple(sizes.of_local(x, group)))
        return _do_all_gather_sum_gradient(x, sizes, group)
    return _all_gather(x, sizes, group, lambda first, counts: collectives.all_gather(first, counts, group))


def local_slice(x: torch.Tensor, sizes: DimSizes, group: Group) -> torch.Tensor:
    """Return this member's slice of `x`, which is equal on all members; backward gathers the gradients of all."""
    return _slice(x, sizes, group, lambda first, counts: collectives.local_slice(first, counts, group))


def reduce_scatter(x: torch.Tensor, sizes: DimSizes, group: Group) -> torch.Tensor:
    """Return this member's slice of the sum of `x` over the group; backward gathers the gradients of all."""
    if not _differentiates(x, group):
        return reduce_scatter_no_grad(x, sizes, group)
    if sizes.balanced:
        sizes = sizes._replace(sizes=tuple(sizes.of_full(x, group)))
    return _do_reduce_scatter(x, sizes, group)


def reduce_scatter_no_grad(x: torch.Tensor, sizes: DimSizes, group: Group) -> torch.Tensor:
    """Return this member's slice of the sum of `x` over the group. All members call it."""
    dim, shape = sizes.dim, x.shape
    if sizes.are_contiguous(shape) and not shape[dim] % group.size:
        return group.reduce_scatter(x).view(*shape[:dim], shape[dim] // group.size, *shape[dim + 1 :])
    return _slice(x, sizes, group, lambda first, counts: group.reduce_scatter(first, _unless_even(counts)))


class PendingReduceScatter:
    """A started `reduce_scatter_no_grad`; `wait` returns the result."""

    def __init__(self, x: torch.Tensor, sizes: DimSizes, group: Group) -> None:
        each = sizes.of_full(x, group)
        first, counts = _move_to_front(x, sizes.dim, each)
        self.dim, self.shape = sizes.dim, (each[group.index], *first.shape[1:])
        self.pending = group.reduce_scatter_async(first, _unless_even(counts))

    def wait(self) -> torch.Tensor:
        return _move_back(self.pending.wait().view(self.shape), self.dim)


def _move_to_front(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Return `x` with `dim` in front, contiguous, and the number of elements of each slice."""
    first = (x if dim == 0 else x.movedim(dim, 0)).contiguous()
    rest = first.shape[1:].numel()
    return first, [size * rest for size in sizes]


def _move_back(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x if dim == 0 else x.movedim(0, dim).contiguous()


def _unless_even(counts: list[int]) -> list[int] | None:
    return None if min(counts) == max(counts) else counts


def _all_gather(
    x: torch.Tensor, sizes: DimSizes, group: Group, call: Callable[[torch.Tensor, list[int]], torch.Tensor]
) -> torch.Tensor:
    each = sizes.of_local(x, group)
    first, counts = _move_to_front(x, sizes.dim, each)
    full = call(first, counts).view(sum(each), *first.shape[1:])
    return full if sizes.dim == 0 else full.movedim(0, sizes.dim)


def _slice(
    x: torch.Tensor, sizes: DimSizes, group: Group, call: Callable[[torch.Tensor, list[int]], torch.Tensor]
) -> torch.Tensor:
    each = sizes.of_full(x, group)
    first, counts = _move_to_front(x, sizes.dim, each)
    return _move_back(call(first, counts).view(each[group.index], *first.shape[1:]), sizes.dim)


def _differentiates(x: torch.Tensor, group: Group) -> bool:
    return group.size > 1 and collectives.differentiates(x)


class _AllGatherSumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: DimSizes, group: Group) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return alias(all_gather_no_grad(x, sizes, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(grad, ctx.sizes, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: DimSizes, group: Group) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return alias(reduce_scatter_no_grad(x, sizes, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.sizes, ctx.group, sum_gradient=True), None, None


_do_all_gather_sum_gradient, _do_reduce_scatter = caller(_AllGatherSumGradient), caller(_ReduceScatter)
