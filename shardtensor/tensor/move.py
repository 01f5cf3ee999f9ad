"""Redistribute local tensors between layouts, with gradients: backward takes the route back.

`shardtensor.layout.route` decides the steps. Convention: a plain tensor is replicated, and its gradient is replicated
too; the gradient of partial sums is the gradient of their sum, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch

from shardtensor.comm import collectives
from shardtensor.comm.collectives import refuse_forward_mode
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.comm.untraced import untraced
from shardtensor.errors import LayoutError, RuleError
from shardtensor.layout.layout import Layout, replicated
from shardtensor.layout.route import Step, route, transfer
from shardtensor.mesh import Mesh
from shardtensor.tensor.exchange import exchange, see

_ALONG: WeakKeyDictionary[Group, dict[tuple[Any, ...], Group]] = WeakKeyDictionary()


def along(group: Group, layout: Layout, axes: Sequence[int]) -> Group:
    """Return the group of the ranks that differ from this one only along `axes` of the layout's grid.

    All ranks of the layout's grid call it. If `axes` cover the grid, it is `group` itself, whose other members
    then take part with no elements.
    """
    rest = [size for axis, size in enumerate(layout.grid) if axis not in axes]
    if all(size == 1 for size in rest):
        return group
    key = (layout.ranks, layout.grid, tuple(axes))
    cached = _ALONG.setdefault(group, {})
    if key not in cached:
        cached[key] = _subgroup(group, layout, axes)
    return cached[key]


def _subgroup(group: Group, layout: Layout, axes: Sequence[int]) -> Group:
    if len(layout.ranks) != group.size:
        raise RuleError(
            "ranks outside the tensor cannot take part in a reduction over some of its axes",
            {"tensor on": f"{len(layout.ranks)} ranks", "group of": f"{group.size} ranks"},
            "make the tensor on a process group of the ranks that hold it",
        )
    mesh = group.mesh
    if mesh is not None and (mesh.sizes, mesh.ranks) == (layout.grid, layout.ranks):
        return group.axis(*(mesh.names[axis] for axis in axes))
    mesh = Mesh(tuple((f"axis{i}", size) for i, size in enumerate(layout.grid)), layout.ranks)
    return group.subgroup(mesh.ranks_along(group.rank, axes))


def run_step(local: torch.Tensor, step: Step, subgroup: Group, rank: int) -> torch.Tensor:
    """Return this rank's local tensor after a step, which shares memory with `local` after a slice or split. It has
    no gradient. All ranks of `subgroup` (those along ``step.axes``, or all) call it; `rank` is the global one."""
    if step.kind == "all_reduce":
        return subgroup.all_reduce(local.clone(memory_format=torch.contiguous_format), step.op)
    if step.kind == "split":
        made = tuple(p for p in step.target.partial if p not in step.source.partial)
        is_full = attrs.evolve(step.target, partial=made).holds_full_value(rank)
        return local if is_full else torch.zeros_like(local)
    if step.kind == "slice":
        return take(local, step.source, step.target, rank)
    if 0 in step.source.shape:
        return local.new_empty(step.target.local_shape(rank))
    return exchange(local, step, subgroup, rank)


def take(local: torch.Tensor, source: Layout, target: Layout, rank: int) -> torch.Tensor:
    """Return the part of `local` that `rank` holds under `target`: a view where it is one box, else a copy."""
    keeps = transfer(source, target, rank, (rank,)).keeps
    if len(keeps) == 1 and not target.packed:
        return see(local, keeps[0][0])
    out = local.new_empty(target.local_shape(rank))
    for here, there in keeps:
        see(out, there).copy_(see(local, here))
    return out


def moved(local: torch.Tensor, source: Layout, target: Layout, group: Group) -> torch.Tensor:
    """Redistribute: return this rank's local tensor under `target`; `local` is the one under `source`.

    Differentiable, except for a partial max or min. Returns `local` itself, or a view of it, if nothing has to be
    sent or reduced. All ranks of the group call it, and all of them run its backward.
    """
    if not route(source, target):
        return local if local.numel() else as_nothing(local, target, group.rank)
    refuse_forward_mode()
    if torch.is_grad_enabled() and local.requires_grad:
        for _, op in source.partial:
            if op not in ("sum", "avg"):
                raise RuleError(
                    f"a partial {op} has no gradient", {"layout": str(source)}, "reduce it under torch.no_grad()"
                )
        return _Moved.apply(local, source, target, group)
    return _run(local, source, target, group)


def common_group(one: Group, other: Group) -> Group:
    """Return a group that contains the ranks of both: one of them, if possible the first, else the default group.

    Raises:
        LayoutError: none of these does.
    """
    if one is other or one.ranks == other.ranks or set(other.ranks) <= set(one.ranks):
        return one
    if set(one.ranks) <= set(other.ranks):
        return other
    world = as_group()
    if {*one.ranks, *other.ranks} <= set(world.ranks):
        return world
    raise LayoutError(
        "no group has the ranks of both layouts",
        {"from ranks": list(one.ranks), "to ranks": list(other.ranks)},
        "make a process group of all of them and reshard to a spec on it first",
    )


def as_nothing(local: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Return an empty local tensor in the local shape of the layout, with the usual strides of that shape. Torch's
    elementwise functions return empty results with strides of zero, like those of an expanded tensor."""
    shape = layout.local_shape(rank)
    if tuple(local.shape) == shape and (0 not in local.stride() or local._is_view()):
        return local
    seen = local.reshape(-1).view(shape)
    return seen if seen.requires_grad else seen.detach()


def _run(local: torch.Tensor, source: Layout, target: Layout, group: Group) -> torch.Tensor:
    for step in route(source, target):
        is_covered = len(step.source.ranks) == len(step.target.ranks) == group.size
        subgroup = group if step.axes is None or not is_covered else along(group, step.source, step.axes)
        local = run_step(local, step, subgroup, group.rank)
    return local


class _Moved(torch.autograd.Function):
    """Redistributes; backward takes the route back. A partial sum of a mean gets its share of the mean's gradient."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, source: Layout, target: Layout, group: Group) -> torch.Tensor:
        ctx.source, ctx.target, ctx.group, ctx.shape = source, target, group, local.shape
        out = _run(local, source, target, group)
        if out is local:
            return out.view_as(out)
        is_own = out.untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
        return out.detach() if is_own else out  # autograd refuses writes into a view that a Function returns

    @staticmethod
    @untraced("a ShardedTensor is moved outside of graphs")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = collectives.whole_gradient(grad)
        made = tuple(p for p in ctx.target.partial if p not in ctx.source.partial)
        if made and grad.requires_grad:  # where partial sums are made, one replica of the gradient counts
            layout = attrs.evolve(
                ctx.target, partial=made
            )  # weights sum to 1 over the holders of an element's partial sums
            grad = _Counted.apply(grad, layout.holds_full_value(ctx.group.rank) / _means(layout))
        back = moved(grad, ctx.target.reduced(), ctx.source.reduced(), ctx.group)
        share = _means(ctx.target) / _means(ctx.source)
        if share != 1:
            back = back * share
        joined = [axis for axis, op in ctx.source.partial if (axis, op) not in ctx.target.partial]
        if joined and back.requires_grad:  # each rank's second-order gradient is a partial sum
            back = collectives.sum_gradient(back, along(ctx.group, ctx.source, joined))
        return back if back.numel() else back.reshape(ctx.shape), None, None, None


class _Counted(torch.autograd.Function):
    """The identity; backward multiplies by `weight`, this rank's share of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Partial.apply(grad, ctx.weight), None


class _Partial(torch.autograd.Function):
    """Multiplies by `weight`; backward is the identity: the gradient of partial sums is the gradient of their sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Counted.apply(grad, ctx.weight), None


def _means(layout: Layout) -> int:
    return math.prod(layout.grid[axis] for axis, op in layout.partial if op == "avg")


def whole(local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Return the whole tensor (global shape) of which `local` is this rank's part. Differentiable; collective."""
    if layout.is_whole_on_all(group.size):
        return local
    return moved(local, layout, _everywhere(layout, group), group)


def part(full: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Return this rank's part (local shape) of a whole tensor. Differentiable; its backward is collective."""
    if layout.is_whole_on_all(group.size):
        return full
    if not layout.packed and not (full.requires_grad and torch.is_grad_enabled()):
        boxes = layout.boxes(group.rank)
        if len(boxes) == 1 and full.dim():
            return full[boxes[0].slices]  # the same as the route, without making one for every new shape
    return moved(full, _everywhere(layout, group), layout.reduced(), group)


def _everywhere(layout: Layout, group: Group) -> Layout:
    if len(layout.ranks) == group.size:
        return replicated(layout.shape, layout.ranks, layout.grid)
    return replicated(layout.shape, group.ranks)


def reduce_local(local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Reduce a local tensor of a partial layout: one all-reduce for each reduction. Differentiable for sum and avg."""
    return moved(local, layout, layout.reduced(), group)
