"""All-gather and reduce-scatter along any dim of tensors of which each member of a group has a stretch.

Each has a form with gradients (on `collectives`) and, for functions that write their own backward, one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardtensor.comm import collectives
from shardtensor.comm.collectives import alias
from shardtensor.comm.function_call import caller
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError


class Stretches(NamedTuple):
    """A dim, from either end, and how it is cut among the members of a group.

    Attributes:
        dim: counted from the front, or from the end where negative.
        sizes: the stretch of each member; None where they follow from the length.
        balanced: stretches may differ by one; else all are equal, or it is an error.
    """

    dim: int
    sizes: tuple[int, ...] | None = None
    balanced: bool = False

    def of_whole(self, x: torch.Tensor, group: Group) -> Sequence[int]:
        """The stretch of each member of what `x` has whole."""
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

    def are_in_order(self, shape: torch.Size) -> bool:
        """Whether equal stretches of this shape, or of which it is made, lie in memory one after the other."""
        return self.sizes is None and not self.balanced and (self.dim == 0 or (self.dim == 1 and shape[0] == 1))

    def of_own(self, x: torch.Tensor, group: Group) -> Sequence[int]:
        """The stretch of each member, of which `x` is this one's; balanced ones are asked for in a small exchange."""
        if self.sizes is not None:
            return self.sizes
        own = x.shape[self.dim]
        if not self.balanced:
            return [own] * group.size
        return [int.from_bytes(size, "little") for size in group.exchange(own.to_bytes(8, "little"))]


def gathered(x: torch.Tensor, stretches: Stretches, group: Group) -> torch.Tensor:
    """The stretches of all members, joined; no gradient. All members call it."""
    dim, shape = stretches.dim, x.shape
    if stretches.are_in_order(shape):  # the usual case, at least cost
        return group.all_gather(x).view(*shape[:dim], shape[dim] * group.size, *shape[dim + 1 :])
    return _joined(x, stretches, group, lambda first, counts: group.all_gather(first.reshape(-1), counts))


def gather(x: torch.Tensor, stretches: Stretches, group: Group, sums: bool = False) -> torch.Tensor:
    """`gathered` with gradients: the result's own stretch or, where work on it is split (`sums`), the summed one."""
    if not _differentiates(x, group):
        return gathered(x, stretches, group)
    if sums:
        known = stretches._replace(sizes=tuple(stretches.of_own(x, group))) if stretches.balanced else stretches
        return _do_gather_sum_gradient(x, known, group)  # the way back asks nobody for sizes
    return _joined(x, stretches, group, lambda first, counts: collectives.all_gather(first, counts, group))


def take(x: torch.Tensor, stretches: Stretches, group: Group) -> torch.Tensor:
    """This member's stretch of what all have; the gradients of all are gathered."""
    return _part(x, stretches, group, lambda first, counts: collectives.take(first, counts, group))


def reduce_scatter(x: torch.Tensor, stretches: Stretches, group: Group) -> torch.Tensor:
    """This member's stretch of the sum of `x` over the members; the gradients of all are gathered."""
    if not _differentiates(x, group):
        return scattered(x, stretches, group)
    known = stretches._replace(sizes=tuple(stretches.of_whole(x, group))) if stretches.balanced else stretches
    return _do_scatter_sum(x, known, group)


def scattered(x: torch.Tensor, stretches: Stretches, group: Group) -> torch.Tensor:
    """`reduce_scatter` without a gradient."""
    dim, shape = stretches.dim, x.shape
    if stretches.are_in_order(shape) and not shape[dim] % group.size:
        return group.reduce_scatter(x).view(*shape[:dim], shape[dim] // group.size, *shape[dim + 1 :])
    return _part(x, stretches, group, lambda first, counts: group.reduce_scatter(first, _unless_even(counts)))


class Scattering:
    """`scattered`, started: other work may be done before `wait`."""

    def __init__(self, x: torch.Tensor, stretches: Stretches, group: Group) -> None:
        sizes = stretches.of_whole(x, group)
        first, counts = _in_front(x, stretches, sizes)
        self.stretches, self.shape = stretches, (sizes[group.index], *first.shape[1:])
        self.pending = group.reduce_scatter_async(first, _unless_even(counts))

    def wait(self) -> torch.Tensor:
        return _last(self.pending.wait().view(self.shape), self.stretches)


def _in_front(x: torch.Tensor, stretches: Stretches, sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """`x` with the dim of the stretches in front, and the elements of each stretch."""
    first = (x if stretches.dim == 0 else x.movedim(stretches.dim, 0)).contiguous()
    rest = first.shape[1:].numel()
    return first, [size * rest for size in sizes]


def _last(x: torch.Tensor, stretches: Stretches) -> torch.Tensor:
    return x if stretches.dim == 0 else x.movedim(0, stretches.dim).contiguous()


def _unless_even(counts: list[int]) -> list[int] | None:
    return None if min(counts) == max(counts) else counts


def _joined(
    x: torch.Tensor, stretches: Stretches, group: Group, call: Callable[[torch.Tensor, list[int]], torch.Tensor]
) -> torch.Tensor:
    sizes = stretches.of_own(x, group)
    first, counts = _in_front(x, stretches, sizes)
    whole = call(first, counts).view(sum(sizes), *first.shape[1:])
    return whole if stretches.dim == 0 else whole.movedim(0, stretches.dim)


def _part(
    x: torch.Tensor, stretches: Stretches, group: Group, call: Callable[[torch.Tensor, list[int]], torch.Tensor]
) -> torch.Tensor:
    sizes = stretches.of_whole(x, group)
    first, counts = _in_front(x, stretches, sizes)
    return _last(call(first, counts).view(sizes[group.index], *first.shape[1:]), stretches)


def _differentiates(x: torch.Tensor, group: Group) -> bool:
    return group.size > 1 and collectives.differentiates(x)


class _GatherSumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stretches: Stretches, group: Group) -> torch.Tensor:
        ctx.stretches, ctx.group = stretches, group
        return alias(gathered(x, stretches, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(grad, ctx.stretches, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stretches: Stretches, group: Group) -> torch.Tensor:
        ctx.stretches, ctx.group = stretches, group
        return alias(scattered(x, stretches, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather(grad, ctx.stretches, ctx.group, sums=True), None, None


_do_gather_sum_gradient, _do_scatter_sum = caller(_GatherSumGradient), caller(_ScatterSum)
