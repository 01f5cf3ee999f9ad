"""Along a cut dim: softmax, running sums and products, and the largest elements; a rank sends one row, or few.

softmax: the maximum and the sum are reduced. ``cumsum``: each rank's own, with the totals of the pieces before its
piece. ``topk``: the best of each rank are gathered, and of these the best are taken; among equals the choice is torch's
own to make, as on the whole tensor.
"""

from __future__ import annotations

import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.layout.layout import CutLayout, DimCut
from shardtensor.mesh import coordinate
from shardtensor.ops.by_rule import Cut, joins
from shardtensor.ops.engine import HALF
from shardtensor.ops.ids import places
from shardtensor.ops.reductions import local_extreme

# -- softmax -----------------------------------------------------------------------------------------------------------


def shifted(local: torch.Tensor, dim: int, team: Group) -> torch.Tensor:
    """`local` less the maximum over `dim` in all ranks, which has no gradient: one all-reduce."""
    with torch.no_grad():
        top = team.all_reduce(local_extreme(local, (dim,), True), "max")
    return local - top


def joined_sum(local: torch.Tensor, dim: int, team: Group) -> torch.Tensor:
    """The sum over `dim` in all ranks (the dim stays), for use by each rank's part of the work."""
    return collectives.sum_gradient(collectives.all_reduce(local.sum(dim, keepdim=True), team), team)


@joins("exponentials")
def exponentials(cut: Cut) -> torch.Tensor:
    """softmax, log_softmax or softmin over a cut dim."""
    (local,), (d,) = cut.locals, cut.dims
    dtype = cut.options.get("dtype")
    if isinstance(cut.options["_stacklevel"], torch.dtype):  # Tensor.softmax(dim, dtype)
        dtype = cut.options["_stacklevel"]
    local = local if dtype is None else local.to(dtype)
    if not local.is_floating_point():
        torch.softmax(torch.empty(1, dtype=local.dtype), 0)  # torch's error
    wide = local.float() if local.dtype in HALF else local
    wide = shifted(-wide if cut.name == "softmin" else wide, d, cut.team)
    powers = wide.exp()
    total = joined_sum(powers, d, cut.team)
    return (wide - total.log() if cut.name == "log_softmax" else powers / total).to(local.dtype)


# -- scans -------------------------------------------------------------------------------------------------------------


def pieces_of(layout: CutLayout, cut: DimCut, team: Group) -> list[int]:
    """Which piece of a cut each member of a team holds; -1 for members outside the layout."""
    spots = (coordinate(layout.ranks, layout.grid, rank) for rank in team.ranks)
    return [-1 if spot is None else layout.piece(cut, spot) for spot in spots]


@joins("scan")
def scan(call: Cut) -> torch.Tensor:
    """A running sum or product along the cut dim: one row of totals from each rank."""
    layout, team, d = call.layouts[0], call.team, call.dims[0]
    cut = layout.dims[d]
    assert cut is not None
    local, dtype = call.locals[0], call.options.get("dtype")
    if not (local.is_floating_point() or local.is_complex()):
        dtype = dtype or torch.int64
    local = local if dtype is None else local.to(dtype)
    x = local.float() if local.dtype in HALF else local
    is_sum = call.name == "cumsum"
    total = x.sum(d, keepdim=True) if is_sum else x.prod(d, keepdim=True)
    counts = [total.numel()] * team.size
    rows = collectives.all_gather_sum_gradient(total.contiguous(), counts, team).view(team.size, *total.shape)
    pieces = pieces_of(layout, cut, team)
    before = rows[[i for i, piece in enumerate(pieces) if 0 <= piece < pieces[team.index]]]
    out = before.sum(0) + x.cumsum(d) if is_sum else before.prod(0) * x.cumprod(d)
    return out.to(local.dtype)


@joins("best")
def best(call: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest (smallest) along the cut dim, in order, and their global indices: k candidates from each rank."""
    layout, team, d = call.layouts[0], call.team, call.dims[0]
    cut = layout.dims[d]
    assert cut is not None
    k, largest = call.options["k"], call.options.get("largest", True)
    if not 0 <= k <= layout.shape[d]:
        torch.topk(torch.empty(layout.shape, device="meta"), k, d)  # torch's error
    local = call.locals[0].movedim(d, 0)
    values, at = torch.topk(local, min(k, local.shape[0]), 0, largest, True)
    at = places(layout, call.group.rank, d, local.device)[at]
    pieces = pieces_of(layout, cut, team)
    sizes = [min(k, cut.pieces.size(piece)) if piece >= 0 else 0 for piece in pieces]
    counts = [size * local[:0].sum(0).numel() for size in sizes]
    every = collectives.all_gather(values.contiguous(), counts, team).view(sum(sizes), *local.shape[1:])
    every_at = team.all_gather(at.contiguous(), counts).view(every.shape)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    order = [starts[i] + j for i in sorted(range(len(pieces)), key=pieces.__getitem__) for j in range(sizes[i])]
    if order != sorted(order):  # candidates in the order of the dim
        index = torch.tensor(order, device=local.device)
        every, every_at = every[index], every_at[index]
    picked, which = torch.topk(every, k, 0, largest, True)
    return torch.return_types.topk((picked.movedim(0, d), every_at.gather(0, which).movedim(0, d)))
