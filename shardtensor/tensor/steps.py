"""Run the steps of a route on a rank's local tensor. What goes where was settled in `shardtensor.layout.route`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import attrs
import torch

from shardtensor.comm.group import Group
from shardtensor.layout.layout import Layout
from shardtensor.layout.steps import Step
from shardtensor.layout.transfer import Region, transfer
from shardtensor.mesh import Ranks
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
    return _all_gather(local, step, team, rank) if step.kind == "all_gather" else _exchange(local, step, team, rank)


def take(local: torch.Tensor, source: Layout, target: Layout, rank: int) -> torch.Tensor:
    """Return the part of `local` that `rank` has under `target`: a view where it is one box, else a copy."""
    keeps = transfer(source, target, rank, (rank,)).keeps
    if len(keeps) == 1 and not target.packed:
        return _see(local, keeps[0][0])
    out = local.new_empty(target.local_shape(rank))
    for here, there in keeps:
        _see(out, there).copy_(_see(local, here))
    return out


def _see(local: torch.Tensor, region: Region) -> torch.Tensor:
    """A view of what a region of a local tensor holds."""
    held = local[region.held] if region.held else local
    return held if region.shape is None else held.view(region.shape)[region.within]


def _reduce_scatter(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    parts = [[_see(local, here) for here, _ in transfer(step.source, step.target, r, (r,)).keeps] for r in team.ranks]
    counts = [sum(piece.numel() for piece in part) for part in parts]
    pieces = [piece for part in parts for piece in part]
    if local.is_contiguous() and _follow_one_another(pieces):
        mine = team.reduce_scatter(local.view(-1), counts)
    else:
        with staging(local.numel(), local) as flat:
            _pack(pieces, flat)
            mine = team.reduce_scatter(flat, counts)
    out = local.new_empty(step.target.local_shape(rank))
    _unpack(mine, [_see(out, there) for _, there in transfer(step.source, step.target, rank, (rank,)).keeps])
    return out


def _all_gather(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    flat = team.all_gather(local if _lies_in_order(step, rank) else _box_by_box(local, step, rank))
    shape = step.target.local_shape(rank)
    if _lands_in_order(step, rank, team.ranks):
        return flat.view(shape)
    out = local.new_empty(shape)
    _unpack(flat, [_see(out, region) for region in _landing(step, rank, team.ranks)])
    return out


@lru_cache(maxsize=1024)
def _lies_in_order(step: Step, rank: int) -> bool:
    """Whether a local tensor, end to end, is what it gives away box by box; not so where a later dim is in blocks."""
    local = torch.empty(step.source.local_shape(rank), device="meta")
    keeps = transfer(step.source, step.target, rank, (rank,)).keeps
    return _follow_one_another([_see(local, here) for here, _ in keeps])


def _box_by_box(local: torch.Tensor, step: Step, rank: int) -> torch.Tensor:
    flat = local.new_empty(local.numel())
    _pack((_see(local, here) for here, _ in transfer(step.source, step.target, rank, (rank,)).keeps), flat)
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
    return _follow_one_another([_see(out, region) for region in _landing(step, rank, members)])


def _exchange(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    """Send and receive pieces: straight from and to where they lie where the group can, else by way of staging.

    A group that takes tensors from anywhere is not given a rank's own pieces, which are copied meanwhile.
    """
    moves = transfer(step.source, step.target, rank, team.ranks)
    out = local.new_empty(step.target.local_shape(rank))
    sends = [[_see(local, region) for region in regions] for regions in moves.sends]
    receives = [[_see(out, region) for region in regions] for regions in moves.receives]
    own = [(_see(local, here), _see(out, there)) for here, there in moves.keeps]
    if not team.moves_lists and own:
        sends[team.index], receives[team.index] = [here for here, _ in own], [there for _, there in own]
        own = []
    lent = _to_stage(sends, team.moves_lists), _to_stage(receives, team.moves_lists)
    with staging(sum(map(sum, lent)), local) as buffer:
        chunks = buffer.split([*lent[0], *lent[1]])
        ins = [_end_to_end(pieces, chunk) for pieces, chunk in zip(sends, chunks[: team.size], strict=True)]
        outs = [_end_to_end(pieces, chunk) for pieces, chunk in zip(receives, chunks[team.size :], strict=True)]
        for pieces, count, flat in zip(sends, lent[0], ins, strict=True):
            if count:
                _pack(pieces, flat)
        pending = team.all_to_all_into(outs, ins)
        for here, there in own:
            there.copy_(here)
        pending.wait()
        for pieces, count, flat in zip(receives, lent[1], outs, strict=True):
            if count:
                _unpack(flat, pieces)
    return out


def _to_stage(pieces_by_peer: Sequence[Sequence[torch.Tensor]], from_anywhere: bool) -> list[int]:
    """How many elements of each peer have to be put end to end elsewhere."""
    counts = [sum(piece.numel() for piece in pieces) for pieces in pieces_by_peer]
    if from_anywhere:
        return [0 if _follow_one_another(pieces) else n for pieces, n in zip(pieces_by_peer, counts, strict=True)]
    return [0] * len(counts) if _follow_one_another([p for pieces in pieces_by_peer for p in pieces]) else counts


def _end_to_end(pieces: Sequence[torch.Tensor], chunk: torch.Tensor) -> torch.Tensor:
    """The flat memory that pieces are sent from or come to: the staging chunk, or their own."""
    if chunk.numel() or not pieces:
        return chunk
    return pieces[0].as_strided((sum(piece.numel() for piece in pieces),), (1,))


def _follow_one_another(pieces: Sequence[torch.Tensor]) -> bool:
    """Whether pieces lie in memory end to end, in their order."""
    at = pieces[0].storage_offset() if pieces else 0
    for piece in pieces:
        if not piece.is_contiguous() or piece.storage_offset() != at or piece.is_conj() or piece.is_neg():
            return False
        at += piece.numel()
    return True


def _pack(pieces: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
    start = 0
    for piece in pieces:
        flat[start : start + piece.numel()].view(piece.shape).copy_(piece)
        start += piece.numel()


def _unpack(flat: torch.Tensor, pieces: Iterable[torch.Tensor]) -> None:
    start = 0
    for piece in pieces:
        piece.copy_(flat[start : start + piece.numel()].view(piece.shape))
        start += piece.numel()
