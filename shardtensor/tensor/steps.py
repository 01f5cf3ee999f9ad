"""Run the steps of a route on a rank's local tensor. What goes where was settled in `shardtensor.layout.route`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import attrs
import torch

from shardtensor.comm.group import Group
from shardtensor.layout.layout import Layout
from shardtensor.layout.route import Step
from shardtensor.layout.transfer import Region, transfer
from shardtensor.mesh import Ranks
from shardtensor.tensor.exchange import exchange
from shardtensor.tensor.memory import follow_one_another, pack, see, unpack
from shardtensor.tensor.staging import staging


def run_step(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    """Return this rank's local tensor after a step. No gradient. All ranks of `team` call it.

    Args:
        local: of shape ``step.source.local_shape(rank)``.
        team: the group of the ranks along ``step.axes``, or of all ranks.
        rank: the global rank of this process.

    Returns:
        a tensor of shape ``step.target.local_shape(rank)``; it shares memory with `local` after a slice or a split.
    """
    if step.kind == "all_reduce":
        return team.all_reduce(local.clone(memory_format=torch.contiguous_format), step.op)
    if step.kind == "split":
        made = tuple(p for p in step.target.partial if p not in step.source.partial)
        brings = attrs.evolve(step.target, partial=made).brings_value(rank)
        return local if brings else torch.zeros_like(local)
    if step.kind == "slice":
        return take(local, step.source, step.target, rank)
    if 0 in step.source.shape:
        return local.new_empty(step.target.local_shape(rank))
    if step.kind == "reduce_scatter":
        return _reduce_scatter(local, step, team, rank)
    return _all_gather(local, step, team, rank) if step.kind == "all_gather" else exchange(local, step, team, rank)


def take(local: torch.Tensor, source: Layout, target: Layout, rank: int) -> torch.Tensor:
    """Return the part of `local` that `rank` has under `target`: a view where it is one box, else a copy."""
    keeps = transfer(source, target, rank, (rank,)).keeps
    if len(keeps) == 1 and not target.packed:
        return see(local, keeps[0][0])
    out = local.new_empty(target.local_shape(rank))
    for here, there in keeps:
        see(out, there).copy_(see(local, here))
    return out


def _reduce_scatter(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    parts = [[see(local, here) for here, _ in transfer(step.source, step.target, r, (r,)).keeps] for r in team.ranks]
    counts = [sum(piece.numel() for piece in part) for part in parts]
    pieces = [piece for part in parts for piece in part]
    if local.is_contiguous() and follow_one_another(pieces):
        mine = team.reduce_scatter(local.view(-1), counts)
    else:
        with staging(local.numel(), local) as flat:
            pack(pieces, flat)
            mine = team.reduce_scatter(flat, counts)
    out = local.new_empty(step.target.local_shape(rank))
    unpack(mine, [see(out, there) for _, there in transfer(step.source, step.target, rank, (rank,)).keeps])
    return out


def _all_gather(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    flat = team.all_gather(local if _lies_in_order(step, rank) else _box_by_box(local, step, rank))
    shape = step.target.local_shape(rank)
    if _lands_in_order(step, rank, team.ranks):
        return flat.view(shape)
    out = local.new_empty(shape)
    unpack(flat, [see(out, region) for region in _landing(step, rank, team.ranks)])
    return out


@lru_cache(maxsize=1024)
def _lies_in_order(step: Step, rank: int) -> bool:
    """Whether a local tensor, end to end, is what it gives away box by box; not so where a later dim is in blocks."""
    local = torch.empty(step.source.local_shape(rank), device="meta")
    keeps = transfer(step.source, step.target, rank, (rank,)).keeps
    return follow_one_another([see(local, here) for here, _ in keeps])


def _box_by_box(local: torch.Tensor, step: Step, rank: int) -> torch.Tensor:
    flat = local.new_empty(local.numel())
    pack((see(local, here) for here, _ in transfer(step.source, step.target, rank, (rank,)).keeps), flat)
    return flat


def _landing(step: Step, rank: int, members: Ranks) -> Iterable[Region]:
    """Where the parts of all members go, in their order."""
    moves = transfer(step.source, step.target, rank, members)
    for peer, regions in zip(members, moves.receives, strict=True):
        yield from (there for _, there in moves.keeps) if peer == rank else regions


@lru_cache(maxsize=1024)
def _lands_in_order(step: Step, rank: int, members: Ranks) -> bool:
    """Whether gathered parts, end to end, already are the local tensor."""
    out = torch.empty(step.target.local_shape(rank), device="meta")
    return follow_one_another([see(out, region) for region in _landing(step, rank, members)])
