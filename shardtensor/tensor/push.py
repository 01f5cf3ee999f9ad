"""The exchange of large pieces by ranks that can write into each other's memory.

Each rank copies what a peer lacks, strided as it lies, straight to where the peer has room for it; once all have
written, each copies what has come into its result. An all-to-all would have it packed first: to copy it once more, and
before anything is sent.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from shardtensor.comm.group import Group
from shardtensor.comm.peer_memory import MOST_BYTES, PeerMemory, peer_memory
from shardtensor.layout.steps import Step
from shardtensor.layout.transfer import transfer
from shardtensor.mesh import Ranks
from shardtensor.tensor.memory import see
from shardtensor.tensor.strided import Copies, Pair, copies, end_to_end, misplacement

BIG = 32 << 20
"""Bytes of a piece from which on this is faster than an all-to-all."""
_SLOT = 256  # bytes; what comes from a peer starts at a multiple


class Slots(NamedTuple):
    """Where in a rank's memory the pieces of each peer go, in bytes.

    Attributes:
        bounds: for each member the starts of the slots of all members, and the end.
        largest: bytes of the most that one rank sends another.
        size: bytes that the memory of every rank has, which is the most that any needs.
    """

    bounds: tuple[tuple[int, ...], ...]
    largest: int
    size: int


class Writes(NamedTuple):
    """What goes to a peer, or comes from it: how it lies in the local tensor, and where in the memory."""

    peer: int
    start: int
    numel: int
    copies: Copies


class Plan(NamedTuple):
    """The copies of one rank: from the old local tensor to the new one, to the peers, and from the own memory."""

    kept: Copies
    sent: tuple[Writes, ...]
    come: tuple[Writes, ...]


def peer_memory_for(step: Step, team: Group, local: torch.Tensor) -> PeerMemory | None:
    """The memory through which the ranks of `team` do this step; None where they send messages.

    All of them decide alike, from the step and from what they once told each other. The first time, and whenever the
    memory has to grow, they talk.
    """
    memory = peer_memory(team)
    item = local.element_size()
    if memory is None or local.is_meta or math.prod(step.source.shape) * item < BIG:
        return None
    room = slots(step, team.ranks, item)
    if room.largest < BIG or room.size > MOST_BYTES:
        return None
    return memory if memory.has_room(room.size, team, local.device) else None


def push(local: torch.Tensor, step: Step, members: Ranks, rank: int, memory: PeerMemory) -> torch.Tensor:
    """Return this rank's new local tensor, through `memory`, which has room. All `members` call it."""
    if local.device != memory.device:  # which way a step goes must not hang on where one rank has its part
        return push(local.to(memory.device), step, members, rank, memory).to(local.device)
    out = local.new_empty(step.target.local_shape(rank))
    plan = _plan(step, rank, members, local.stride(), local.element_size(), misplacement(local), misplacement(out))
    dtype, me = local.dtype, members.index(rank)

    def write() -> None:
        for part in plan.sent:
            for apart, together in part.copies.between(local, memory.room(part.peer, part.start, part.numel, dtype)):
                together.copy_(apart)
        for old, new in plan.kept.between(local, out):
            new.copy_(old)

    def read() -> None:
        for part in plan.come:
            for apart, together in part.copies.between(out, memory.room(me, part.start, part.numel, dtype)):
                apart.copy_(together)

    memory.swap(write, read)
    return out


@lru_cache(maxsize=256)
def slots(step: Step, members: Ranks, item: int) -> Slots:
    """Divide the memory of each member among its peers; the same on every rank."""
    bounds, largest = [], 0
    for rank in members:
        receives = transfer(step.source, step.target, rank, members).receives
        sizes = [sum(region.numel for region in regions) * item for regions in receives]
        largest = max(largest, *sizes)
        bounds.append(tuple(accumulate((size + -size % _SLOT for size in sizes), initial=0)))
    return Slots(tuple(bounds), largest, max(ends[-1] for ends in bounds))


@lru_cache(maxsize=256)
def _plan(
    step: Step,
    rank: int,
    members: Ranks,
    stride: tuple[int, ...],
    item: int,
    misplaced: int | None,
    misplaced_out: int | None,
) -> Plan:
    """What `rank` does, with a local tensor of these strides."""
    moves = transfer(step.source, step.target, rank, members)
    bounds = slots(step, members, item).bounds
    me, n = members.index(rank), len(members)
    old = torch.empty_strided(step.source.local_shape(rank), stride, device="meta")
    new = torch.empty(step.target.local_shape(rank), device="meta")
    both = None if misplaced is None or misplaced_out is None else math.gcd(misplaced, misplaced_out)
    sent, come = [], []
    for peer in ((me + i) % n for i in range(1, n)):  # each rank starts with another peer, so that none is crowded
        leaving = end_to_end(see(old, region) for region in moves.sends[peer])
        coming = end_to_end(see(new, region) for region in moves.receives[peer])
        if numel := _elements(leaving):
            sent.append(Writes(peer, bounds[peer][me], numel, copies(leaving, item, misplaced)))
        if numel := _elements(coming):
            come.append(Writes(peer, bounds[me][peer], numel, copies(coming, item, misplaced_out)))
    kept = [(see(old, here), see(new, there)) for here, there in moves.keeps]
    return Plan(copies(kept, item, both), tuple(sent), tuple(come))


def _elements(pairs: list[Pair]) -> int:
    return sum(one.numel() for one, _ in pairs)
