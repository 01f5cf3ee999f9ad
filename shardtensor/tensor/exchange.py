"""The exchange of pieces between ranks: one all-to-all, from and to where the pieces lie wherever they lie in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.steps import Step
from shardtensor.layout.transfer import transfer
from shardtensor.tensor.memory import end_to_end, follow_one_another, pack, see, unpack
from shardtensor.tensor.staging import staging


def exchange(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    """Return this rank's new local tensor; no gradient. All ranks of `team` call it.

    A rank's own pieces take the same way: what is in order on one side is then moved without a copy of ours. Rows that
    become columns are put end to end before they are sent and arrive in place; columns that become rows leave from
    where they lie and are taken apart after.
    """
    moves = transfer(step.source, step.target, rank, team.ranks)
    out = local.new_empty(step.target.local_shape(rank))
    sends, receives = list(moves.sends), list(moves.receives)
    if moves.keeps:
        sends[team.index], receives[team.index] = zip(*moves.keeps, strict=True)
    leaving = [see(local, region) for regions in sends for region in regions]
    coming = [see(out, region) for regions in receives for region in regions]
    counts = [sum(region.numel for region in regions) for regions in (*sends, *receives)]
    send_counts, recv_counts = counts[: team.size], counts[team.size :]
    leaves_at_once, comes_in_place = follow_one_another(leaving), follow_one_another(coming)
    with staging(sum(send_counts) * (not leaves_at_once) + sum(recv_counts) * (not comes_in_place), local) as buffer:
        sent = _memory(leaving, leaves_at_once, buffer, 0)
        received = _memory(coming, comes_in_place, buffer, buffer.numel() - sum(recv_counts))
        if not leaves_at_once:
            pack(leaving, sent)
        team.all_to_all(sent, send_counts, recv_counts, received)
        if not comes_in_place:
            unpack(received, coming)
    return out


def _memory(pieces: Sequence[torch.Tensor], in_order: bool, buffer: torch.Tensor, start: int) -> torch.Tensor:
    """The flat memory of pieces: their own where they lie in order, else a part of the buffer."""
    count = sum(piece.numel() for piece in pieces)
    if not in_order:
        return buffer[start : start + count]
    return end_to_end(pieces) if pieces else buffer[:0]
