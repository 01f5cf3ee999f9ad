"""Between a rank's part and the whole, with gradients, under one convention: a plain tensor is a copy on every rank
and so is its gradient. `Whole` and `Part` are each other's adjoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.errors import RuleError
from shardtensor.layout.assembly import assembly
from shardtensor.layout.layout import Layout
from shardtensor.mesh import Mesh

_ALONG: WeakKeyDictionary[Group, dict[tuple[Any, ...], Group]] = WeakKeyDictionary()


def along(group: Group, layout: Layout, axes: Sequence[int]) -> Group:
    """The group of the ranks that differ from this one only along `axes` of the layout's grid.

    All ranks of the layout's grid call it. When the axes are all there is, it is `group` itself, whose other
    members then take part with nothing.
    """
    rest = [size for axis, size in enumerate(layout.grid) if axis not in axes]
    if all(size == 1 for size in rest):
        return group
    key = (layout.ranks, layout.grid, tuple(axes))
    known = _ALONG.setdefault(group, {})
    if key not in known:
        known[key] = _team(group, layout, axes)
    return known[key]


def _team(group: Group, layout: Layout, axes: Sequence[int]) -> Group:
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


def gather_whole(local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Return the whole tensor on every rank of `group`; no gradient. All ranks of the group call it."""
    if layout.is_whole_on_all(group.size):
        return local
    team = along(group, layout, layout.parting_axes) if len(layout.ranks) == group.size else group
    plan = assembly(layout, team.ranks)
    brings = plan.counts[team.index] if team.index >= 0 else 0
    flat = team.all_gather(local.reshape(-1)[:brings], plan.counts)
    return assemble(flat, layout, team)


def assemble(flat: torch.Tensor, layout: Layout, team: Group) -> torch.Tensor:
    """Put gathered elements (flat, group order) where they belong in the whole tensor."""
    plan = assembly(layout, team.ranks)
    if plan.in_order:
        return flat.view(layout.shape)
    out = flat.new_empty(layout.shape)
    for piece in plan.contributions:
        local = flat[piece.start : piece.start + math.prod(piece.local_shape)].view(piece.local_shape)
        for here, there in zip(piece.local_boxes, piece.boxes, strict=True):
            out[there.slices].copy_(local[here.slices].view(there.sizes) if layout.packed else local[here.slices])
    return out


def cut_part(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Return the local tensor of `rank` out of the whole: a view where it is one box, else a copy; no gradient."""
    boxes = layout.boxes(rank)
    if len(boxes) == 1 and not layout.packed:
        return full[boxes[0].slices] if full.dim() else full
    out = full.new_empty(layout.local_shape(rank))
    for here, there in zip(layout.local_boxes(rank), boxes, strict=True):
        piece = out[here.slices]
        (piece.view(there.sizes) if layout.packed else piece).copy_(full[there.slices])
    return out


class Whole(torch.autograd.Function):
    """Part -> whole: gathers forward; backward takes this rank's part of the gradient, which is a copy everywhere."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
        ctx.layout, ctx.group = layout, group
        out = gather_whole(local, layout, group)
        return out.view_as(out) if out is local else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return part(grad, ctx.layout, ctx.group), None, None


class Part(torch.autograd.Function):
    """Whole -> part: takes this rank's part forward; backward gathers the parts of the gradient."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
        ctx.layout, ctx.group = layout, group
        out = cut_part(full, layout, group.rank)
        return out.view_as(out) if out is full else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return whole(grad.contiguous(), ctx.layout, ctx.group), None, None


def whole(local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Return the whole tensor (global shape) of which `local` is this rank's part. Differentiable; collective."""
    if layout.partial:
        local, layout = settle(local, layout, group), layout.reduced()
    if torch.is_grad_enabled() and local.requires_grad:
        return Whole.apply(local, layout, group)
    return gather_whole(local, layout, group)


def part(full: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Return this rank's part (local shape) of a whole tensor. Differentiable; its backward is collective."""
    if layout.is_whole_on_all(group.size):
        return full
    if torch.is_grad_enabled() and full.requires_grad:
        return Part.apply(full, layout, group)
    return cut_part(full, layout, group.rank)


def settle(local: torch.Tensor, layout: Layout, group: Group) -> torch.Tensor:
    """Join the addends of a partial layout: one all-reduce per operation. Differentiable for sum and avg."""
    for op in dict.fromkeys(op for _, op in layout.partial):
        team = along(group, layout, [axis for axis, other in layout.partial if other == op])
        if op in ("sum", "avg"):
            local = collectives.all_reduce(local, team)
            local = local / team.size if op == "avg" else local
        elif local.requires_grad and torch.is_grad_enabled():
            raise RuleError(
                f"a partial {op} has no gradient", {"layout": str(layout)}, "reduce it under torch.no_grad()"
            )
        else:
            local = team.all_reduce(local.clone(), op)
    return local
