"""The exchange of pieces between ranks: one all-to-all, from and to where the pieces lie wherever they lie in order.

What is to be copied is settled once for each step, as strides; a call then costs the host little more than the copies
and the collective themselves. Where ranks can write into each other's memory, large pieces go there without it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.steps import Step
from shardtensor.layout.transfer import transfer
from shardtensor.mesh import Ranks
from shardtensor.tensor.memory import follow_one_another, see
from shardtensor.tensor.push import peer_memory_for, push
from shardtensor.tensor.staging import staging
from shardtensor.tensor.strided import WIDEST, Copies, copies, end_to_end, misplacement


class Side(NamedTuple):
    """What leaves, or what comes.

    Attributes:
        counts: elements for each member, and `total` of them all.
        in_order: whether they lie end to end as they are, from element `start` on; then nothing is copied.
        copies: from or to where they are end to end.
    """

    counts: list[int]
    total: int
    in_order: bool
    start: int
    copies: Copies


def exchange(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    """Return this rank's new local tensor; no gradient. All ranks of `team` call it.

    A rank's own pieces take the same way: what is in order on one side is then moved without a copy of ours. Rows that
    become columns are put end to end before they are sent and arrive in place; columns that become rows leave from
    where they lie and are taken apart after.
    """
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    memory = peer_memory_for(step, team, local)
    if memory is not None:
        return push(local, step, team.ranks, rank, memory)
    out = local.new_empty(step.target.local_shape(rank))
    item = local.element_size()
    leaving, coming = _sides(step, rank, team.ranks, local.stride(), item, misplacement(local), misplacement(out))
    # What comes starts with a whole word.
    first = 0 if leaving.in_order else leaving.total + -leaving.total % WIDEST
    with staging(first + (0 if coming.in_order else coming.total), local) as buffer:
        if leaving.in_order:
            sent = local.as_strided((leaving.total,), (1,), local.storage_offset() + leaving.start)
        else:
            sent = buffer[: leaving.total]
            for apart, together in leaving.copies.between(local, sent):
                together.copy_(apart)
        received = out.view(-1) if coming.in_order else buffer[first:]
        team.all_to_all(sent, leaving.counts, coming.counts, received)
        if not coming.in_order:
            for apart, together in coming.copies.between(out, received):
                apart.copy_(together)
    return out


@lru_cache(maxsize=1024)
def _sides(
    step: Step,
    rank: int,
    members: Ranks,
    stride: tuple[int, ...],
    item: int,
    misplaced: int | None,
    misplaced_out: int | None,
) -> tuple[Side, Side]:
    """What leaves a local tensor of these strides, and what comes."""
    moves = transfer(step.source, step.target, rank, members)
    sends, receives = list(moves.sends), list(moves.receives)
    if moves.keeps:
        own = members.index(rank)
        sends[own], receives[own] = zip(*moves.keeps, strict=True)
    old = torch.empty_strided(step.source.local_shape(rank), stride, device="meta")
    new = torch.empty(step.target.local_shape(rank), device="meta")
    found = []
    for local, regions_by_peer, at in ((old, sends, misplaced), (new, receives, misplaced_out)):
        views = [see(local, region) for regions in regions_by_peer for region in regions]
        counts = [sum(region.numel for region in regions) for regions in regions_by_peer]
        start = int(views[0].storage_offset()) if views else 0
        settled = copies(end_to_end(views), item, at)
        found.append(Side(counts, sum(counts), follow_one_another(views), start, settled))
    return found[0], found[1]
