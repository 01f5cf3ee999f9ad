"""Redistribution: the steps of a route, run with gradients; the only way a value changes its layout.

`redistribute` takes this rank's local tensor from one layout to another. A value of a plan's flow has no layout, for
its batch dims are not known until the call: `run_moves` runs `DimStep`s, each along one dim and a group.
`shardtensor.layout.route` determines the steps. Backward runs the adjoint of each step, in reverse.

Convention: a plain tensor is replicated, and its gradient is replicated too; the gradient of partial sums is the
gradient of their sum, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import attrs
import torch

from shardtensor.comm import collectives
from shardtensor.comm.collectives import Run, differentiates, with_adjoint
from shardtensor.comm.exchange import exchange, see
from shardtensor.comm.group import Group, Pending
from shardtensor.comm.process_group import as_group
from shardtensor.comm.untraced import untraced
from shardtensor.errors import LayoutError, RuleError
from shardtensor.layout.layout import Layout, replicated
from shardtensor.layout.route import DimStep, Step, route, transfer
from shardtensor.mesh import Mesh

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


def take(local: torch.Tensor, source: Layout, target: Layout, rank: int) -> torch.Tensor:
    """Return the part of `local` that `rank` holds under `target`: a view where it is one box, else a copy."""
    keeps = transfer(source, target, rank, (rank,)).keeps
    if len(keeps) == 1 and not target.packed:
        return see(local, keeps[0][0])
    out = local.new_empty(target.local_shape(rank))
    for here, there in keeps:
        see(out, there).copy_(see(local, here))
    return out


def redistribute(local: torch.Tensor, source: Layout, target: Layout, group: Group) -> torch.Tensor:
    """Return this rank's local tensor under `target`; `local` is the one under `source`.

    Differentiable, except for a partial max or min. Returns `local` itself, or a view of it, if nothing has to be
    sent or reduced. All ranks of the group call it, and all of them run its backward.
    """
    steps = route(source, target)
    if not steps:
        return local if local.numel() else as_nothing(local, target, group.rank)
    refuse_gradient_of_extremes(local, source)
    for step in steps:
        local = with_adjoint(local, _run, _run_back, step, group)
    return local


def refuse_gradient_of_extremes(local: torch.Tensor, layout: Layout) -> None:
    """Raise RuleError for a partial max or min, of the terms `local`, if autograd records what is done with it."""
    for _, op in layout.partial:
        if op not in ("sum", "avg") and differentiates(local):
            fix = "reduce it under torch.no_grad()"
            raise RuleError(f"a partial {op} has no gradient", {"layout": str(layout)}, fix)


@untraced("a ShardedTensor is redistributed outside of graphs")
def _run(local: torch.Tensor, step: Step, group: Group) -> torch.Tensor:
    """Return this rank's local tensor after a step, which shares memory with `local` after a slice or split."""
    if step.kind == "split":
        made = tuple(p for p in step.target.partial if p not in step.source.partial)
        is_full = attrs.evolve(step.target, partial=made).holds_full_value(group.rank)
        return local if is_full else torch.zeros_like(local)
    if step.kind == "slice":
        return take(local, step.source, step.target, group.rank)
    is_covered = len(step.source.ranks) == len(step.target.ranks) == group.size
    subgroup = group if step.axes is None or not is_covered else along(group, step.source, step.axes)
    if step.kind == "all_reduce":
        return subgroup.all_reduce(local.clone(memory_format=torch.contiguous_format), step.op)
    if 0 in step.source.shape:
        return local.new_empty(step.target.local_shape(group.rank))
    return exchange(local, step, subgroup, group.rank)


@untraced("a ShardedTensor is redistributed outside of graphs")
def _run_back(grad: torch.Tensor, step: Step, group: Group) -> torch.Tensor:
    """Return the gradient before a step from the one after it. Each term of a mean gets its share of the gradient."""
    for back in route(step.target.reduced(), step.source.reduced()):
        grad = _run(grad, back, group)
    share = means(step.target) / means(step.source)
    return grad if share == 1 else grad * share


def means(layout: Layout) -> int:
    """Return the number of terms of which a partial value is the mean."""
    return math.prod(layout.grid[axis] for axis, op in layout.partial if op == "avg")


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


def whole(local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Return the whole tensor (global shape) of which `local` is this rank's part. Differentiable; collective."""
    if layout.is_whole_on_all(group.size):
        return local
    return redistribute(local, layout, _everywhere(layout, group), group)


def part(full: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Return this rank's part (local shape) of a whole tensor. Differentiable; its backward is collective."""
    if layout.is_whole_on_all(group.size):
        return full
    if not (full.requires_grad and torch.is_grad_enabled()) and layout.boxes(group.rank):
        return part_of(full, layout, group.rank)
    return redistribute(full, _everywhere(layout, group), layout.reduced(), group)


def part_of(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Return what `rank` holds of a whole tensor: a view where it is one box, else a copy. No gradient."""
    boxes = layout.boxes(rank)
    if len(boxes) == 1 and not layout.packed and full.dim():
        return full[boxes[0].slices]  # as `take` does, which computes and keeps a transfer for every new shape
    return take(full, replicated(layout.shape, layout.ranks, layout.grid), layout, rank)


def _everywhere(layout: Layout, group: Group) -> Layout:
    if len(layout.ranks) == group.size:
        return replicated(layout.shape, layout.ranks, layout.grid)
    return replicated(layout.shape, group.ranks)


def reduce_local(local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Reduce a local tensor of a partial layout: one all-reduce for each reduction. Differentiable for sum and avg."""
    return redistribute(local, layout, layout.reduced(), group)


# -- values of flows: one dim is known, the others are not -------------------------------------------------------------

Sizes = tuple[int, ...] | None
"""The size of each member's slice of a dim; None if all are equal."""


class Move(NamedTuple):
    """A step of a flow, with the group of the ranks that run it; `call` runs it, with a gradient."""

    step: DimStep
    subgroup: Group
    call: Run


def move_along(step: DimStep, group: Group) -> Move:
    """Return a step of a flow along a group."""
    if step.kind == "sum_gradient":
        return Move(step, group, partial(collectives.sum_gradient, group=group))
    if step.kind == "all_reduce":  # in place: the value is used nowhere else
        return Move(step, group, partial(collectives.all_reduce_fresh, group=group))
    call = {"all_gather": all_gather, "slice": local_slice, "reduce_scatter": reduce_scatter}[step.kind]
    return Move(step, group, partial(call, step=step, group=group))


def run_moves(x: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor:
    """Return the value after all steps of a flow. All ranks of their groups call it, and run its backward."""
    for move in moves:
        x = move.call(x)
    return x


def all_gather(x: torch.Tensor, step: DimStep, group: Group) -> torch.Tensor:
    """Concatenate the members' slices along the dim of the step. The gradient is this member's slice of the result's,
    or if it `sums`, this member's slice of the sum of the members' gradients."""
    if group.size == 1:
        return x
    sizes = sizes_of_slice(x, step, group) if step.balanced else step.sizes
    return with_adjoint(x, _all_gather, _reduce_scatter if step.sums else _slice, step.dim, sizes, group)


def local_slice(x: torch.Tensor, step: DimStep, group: Group) -> torch.Tensor:
    """Return this member's slice of `x`, which is equal on all members; backward gathers the gradients of all."""
    return with_adjoint(x, _slice, _all_gather, step.dim, step.sizes_of(x.shape, group.size), group).contiguous()


def reduce_scatter(x: torch.Tensor, step: DimStep, group: Group) -> torch.Tensor:
    """Return this member's slice of the sum of `x` over the group; backward gathers the gradients of all."""
    if group.size == 1:
        return x
    return with_adjoint(x, _reduce_scatter, _all_gather, step.dim, step.sizes_of(x.shape, group.size), group)


def sizes_of_slice(x: torch.Tensor, step: DimStep, group: Group) -> Sizes:
    """Return the sizes of the members' slices of a dim, of which `x` is this member's; balanced ones are exchanged."""
    if not step.balanced:
        return step.sizes
    own = x.shape[step.dim].to_bytes(8, "little")
    return tuple(int.from_bytes(size, "little") for size in group.exchange(own))


def summed_gradient(grad: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the gradient before a move that sums it, of which `grad` is this member's term; with a gradient."""
    if move.step.kind == "all_gather":
        return reduce_scatter(grad, move.step, move.subgroup)
    return collectives.all_reduce(grad, move.subgroup)


def start_summed_gradient(grad: torch.Tensor, move: Move) -> Pending | PendingReduceScatter:
    """Start `summed_gradient` without a gradient; `wait` returns the result, perhaps in the memory of `grad`."""
    if move.step.kind == "all_gather":
        return PendingReduceScatter(grad, move.step, move.subgroup)
    return move.subgroup.all_reduce_async(grad)


class PendingReduceScatter:
    """A started `reduce_scatter` without a gradient; `wait` returns the result."""

    def __init__(self, x: torch.Tensor, step: DimStep, group: Group) -> None:
        sizes = step.sizes_of(x.shape, group.size)
        self.place = x.shape, step.dim, _own(x, step.dim, sizes, group)
        self.pending = group.reduce_scatter_async(*_packed(x, step.dim, sizes))

    def wait(self) -> torch.Tensor:
        return _unpacked(self.pending.wait(), *self.place).contiguous()


def _all_gather(x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> torch.Tensor:
    shape = x.shape
    if sizes is None and dim >= 0 and math.prod(shape[:dim]) == 1:  # the slices lie in order: no copies
        return group.all_gather(x).view(*shape[:dim], shape[dim] * group.size, *shape[dim + 1 :])
    length = shape[dim] * group.size if sizes is None else sum(sizes)
    return _unpacked(group.all_gather(*_packed(x, dim, sizes)), shape, dim, length)


def _reduce_scatter(x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> torch.Tensor:
    shape = x.shape
    if sizes is None and dim >= 0 and math.prod(shape[:dim]) == 1:
        return group.reduce_scatter(x).view(*shape[:dim], shape[dim] // group.size, *shape[dim + 1 :])
    own = _own(x, dim, sizes, group)
    return _unpacked(group.reduce_scatter(*_packed(x, dim, sizes)), shape, dim, own).contiguous()


def _slice(x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> torch.Tensor:
    own = _own(x, dim, sizes, group)
    x = x.narrow(dim, group.index * own if sizes is None else sum(sizes[: group.index]), own)
    return _unpacked(_packed(x, dim, None)[0], x.shape, dim, own)  # in the memory order of what `_all_gather` returns


def _own(x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> int:
    """Return the size of this member's slice of a dim that is full in `x`."""
    return x.shape[dim] // group.size if sizes is None else sizes[group.index]


def _packed(x: torch.Tensor, dim: int, sizes: Sizes) -> tuple[torch.Tensor, list[int] | None]:
    """Return the elements with slices of the dim one after the other, and the number of each; None if all are equal."""
    first = (x if dim == 0 else x.movedim(dim, 0)).contiguous()
    if sizes is None or min(sizes) == max(sizes):
        return first, None
    rest = first.shape[1:].numel()
    return first, [size * rest for size in sizes]


def _unpacked(flat: torch.Tensor, shape: torch.Size, dim: int, length: int) -> torch.Tensor:
    """Return packed elements in a `shape` with another `length` of the dim."""
    full = flat.view(length, *shape[:dim], *shape[dim:][1:])
    return full if dim == 0 else full.movedim(0, dim)
