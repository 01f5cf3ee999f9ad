"""The exchange of pieces between ranks: one all-to-all, from and to where the pieces lie wherever they lie in order.

What is to be copied is settled once for each step and form of the local tensor, as strides; a call then costs the host
little more than the copies and the collective themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.route import Step
from shardtensor.layout.transfer import transfer
from shardtensor.tensor.memory import follow_one_another, see
from shardtensor.tensor.staging import staging
from shardtensor.tensor.strided import WIDEST, Copies, copies, end_to_end, misplacement

MOST = 1024
"""Exchanges kept for one group; when there are more, all are forgotten."""


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


class Plan(NamedTuple):
    """One rank's part of an exchange; `step` is kept, so that no other gets its identity."""

    step: Step
    shape: tuple[int, ...]
    leaving: Side
    coming: Side
    first: int
    buffered: int


def exchange(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    """Return this rank's new local tensor; no gradient. All ranks of `team` call it.

    A rank's own pieces take the same way: what is in order on one side is then moved without a copy of ours. Rows that
    become columns are put end to end before they are sent and arrive in place; columns that become rows leave from
    where they lie and are taken apart after.
    """
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    plan = _plan(local, step, team, rank)
    leaving, coming = plan.leaving, plan.coming
    with staging(plan.buffered, local) as buffer:
        if leaving.in_order:
            sent = local.as_strided((leaving.total,), (1,), local.storage_offset() + leaving.start)
        else:  # first of all: what follows costs the host while the copies run
            sent = buffer if plan.buffered == leaving.total else buffer[: leaving.total]
            for apart, together in leaving.copies.between(local, sent):
                together.copy_(apart)
        out = local.new_empty(plan.shape)
        received = out.view(-1) if coming.in_order else buffer[plan.first :]
        team.all_to_all(sent, leaving.counts, coming.counts, received)
        if not coming.in_order:
            for apart, together in coming.copies.between(out, received):
                apart.copy_(together)
    return out


def _plan(local: torch.Tensor, step: Step, team: Group, rank: int) -> Plan:
    kept = team.__dict__.get("_exchanges")
    if kept is None:
        kept = team.__dict__["_exchanges"] = {}
    misplaced = misplacement(local)
    key = (id(step), rank, local.stride(), local.element_size(), misplaced)
    plan = kept.get(key)
    if plan is None:
        if len(kept) >= MOST:
            kept.clear()
        plan = kept[key] = _settle(local, step, team, rank, misplaced)
    return plan


def _settle(local: torch.Tensor, step: Step, team: Group, rank: int, misplaced: int | None) -> Plan:
    members = team.ranks
    moves = transfer(step.source, step.target, rank, members)
    sends, receives = list(moves.sends), list(moves.receives)
    if moves.keeps:
        own = members.index(rank)
        sends[own], receives[own] = zip(*moves.keeps, strict=True)
    shape = step.target.local_shape(rank)
    old = torch.empty_strided(step.source.local_shape(rank), local.stride(), device="meta")
    new = torch.empty(shape, device="meta")
    sides = []
    # A new tensor starts with a whole word.
    for x, regions_by_peer, at in ((old, sends, misplaced), (new, receives, 0 if local.is_cuda else None)):
        views = [see(x, region) for regions in regions_by_peer for region in regions]
        counts = [sum(region.numel for region in regions) for regions in regions_by_peer]
        start = int(views[0].storage_offset()) if views else 0
        settled = copies(end_to_end(views), local.element_size(), at)
        sides.append(Side(counts, sum(counts), follow_one_another(views), start, settled))
    leaving, coming = sides
    first = 0 if leaving.in_order else leaving.total + -leaving.total % WIDEST  # what comes starts with a whole word
    return Plan(step, shape, leaving, coming, first, first + (0 if coming.in_order else coming.total))
