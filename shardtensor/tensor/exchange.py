"""The exchange of pieces between ranks: one all-to-all, from and to where the pieces lie wherever they lie in order.

What is to be copied is settled once for each step, as strides; a call then costs the host little more than the copies
and the collective themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.steps import Step
from shardtensor.layout.transfer import transfer
from shardtensor.mesh import Ranks
from shardtensor.tensor.memory import follow_one_another, see
from shardtensor.tensor.staging import staging

WORD = 8  # bytes that CUDA's copy of strided memory moves at a time, where all pieces allow it; else one element


class Strided(NamedTuple):
    """Equal pieces of memory: where they lie, and where when all pieces are put end to end."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    packed_stride: tuple[int, ...]
    packed_offset: int


class Side(NamedTuple):
    """What leaves, or what comes.

    Attributes:
        counts: elements for each member, and `total` of them all.
        in_order: whether they lie end to end as they are, from element `start` on; then nothing is copied.
        pieces: to copy, in words of `per_word` elements.
    """

    counts: list[int]
    total: int
    in_order: bool
    start: int
    pieces: tuple[Strided, ...]
    per_word: int


def exchange(local: torch.Tensor, step: Step, team: Group, rank: int) -> torch.Tensor:
    """Return this rank's new local tensor; no gradient. All ranks of `team` call it.

    A rank's own pieces take the same way: what is in order on one side is then moved without a copy of ours. Rows that
    become columns are put end to end before they are sent and arrive in place; columns that become rows leave from
    where they lie and are taken apart after.
    """
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    out = local.new_empty(step.target.local_shape(rank))
    at = local.storage_offset()
    leaving, coming = _sides(
        step, rank, team.ranks, local.stride(), at % WORD, local.element_size() if local.is_cuda else WORD
    )
    first = 0 if leaving.in_order else leaving.total + -leaving.total % WORD  # what comes starts with a whole word
    with staging(first + (0 if coming.in_order else coming.total), local) as buffer:
        if leaving.in_order:
            sent = local.as_strided((leaving.total,), (1,), at + leaving.start)
        else:
            sent = buffer[: leaving.total]
            for apart, together in _pairs(leaving, local, sent):
                together.copy_(apart)
        received = out.view(-1) if coming.in_order else buffer[first:]
        team.all_to_all(sent, leaving.counts, coming.counts, received)
        if not coming.in_order:
            for apart, together in _pairs(coming, out, received):
                apart.copy_(together)
    return out


def _pairs(side: Side, local: torch.Tensor, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pieces of `local`, and their places in `flat`."""
    if side.per_word > 1:
        local, flat = local.view(-1).view(torch.int64), flat.view(-1)[: side.total].view(torch.int64)
    start, packed_start = local.storage_offset(), flat.storage_offset()
    return [
        (local.as_strided(size, stride, start + offset), flat.as_strided(size, packed, packed_start + packed_offset))
        for size, stride, offset, packed, packed_offset in side.pieces
    ]


@lru_cache(maxsize=1024)
def _sides(
    step: Step, rank: int, members: Ranks, stride: tuple[int, ...], misplaced: int, item: int
) -> tuple[Side, Side]:
    """What leaves a local tensor of these strides, and what comes.

    Args:
        misplaced: elements by which the tensor starts after a multiple of eight in its storage.
        item: bytes of an element; eight where words bring nothing.
    """
    moves = transfer(step.source, step.target, rank, members)
    sends, receives = list(moves.sends), list(moves.receives)
    if moves.keeps:
        own = members.index(rank)
        sends[own], receives[own] = zip(*moves.keeps, strict=True)
    old = torch.empty_strided(step.source.local_shape(rank), stride, device="meta")
    new = torch.empty(step.target.local_shape(rank), device="meta")
    found = []
    for local, regions_by_peer, is_in_place in ((old, sends, not misplaced * item % WORD), (new, receives, True)):
        views = [see(local, region) for regions in regions_by_peer for region in regions]
        counts = [sum(region.numel for region in regions) for regions in regions_by_peer]
        pieces = _merged(views)
        per_word = WORD // item if is_in_place and local.is_contiguous() and not local.numel() * item % WORD else 1
        if per_word > 1:
            words = tuple(word for piece in pieces if (word := _in_words(piece, per_word)) is not None)
            pieces, per_word = (words, per_word) if len(words) == len(pieces) else (pieces, 1)
        start = int(views[0].storage_offset()) if views else 0
        found.append(Side(counts, sum(counts), follow_one_another(views), start, pieces, per_word))
    return found[0], found[1]


def _merged(views: Sequence[torch.Tensor]) -> tuple[Strided, ...]:
    """Views, end to end when packed; runs of equal ones at equal distances are one with a dim more."""
    pieces: list[Strided] = []
    k = packed = 0
    while k < len(views):
        view = views[k]
        size, stride, offset, count = tuple(view.shape), view.stride(), int(view.storage_offset()), view.numel()
        run, distance = 1, 0
        while k + run < len(views):
            other = views[k + run]
            gap = int(other.storage_offset()) - offset
            if tuple(other.shape) != size or other.stride() != stride or gap < 0 or (run > 1 and gap != run * distance):
                break
            distance, run = gap if run == 1 else distance, run + 1
        inner = torch.empty(size, device="meta").stride()
        if count:
            pieces.append(Strided((run, *size), (distance, *stride), offset, (count, *inner), packed))
        packed += run * count
        k += run
    return tuple(pieces)


def _in_words(piece: Strided, n: int) -> Strided | None:
    """A piece in words of n elements; None where its rows do not start and end with whole words."""
    size, stride, offset, packed, packed_offset = piece
    ends = (size[-1], offset, packed_offset, *stride[:-1], *packed[:-1])
    if len(size) < 2 or stride[-1] != 1 or any(x % n for x in ends):
        return None
    outer = tuple(x // n for x in stride[:-1]), tuple(x // n for x in packed[:-1])
    return Strided((*size[:-1], size[-1] // n), (*outer[0], 1), offset // n, (*outer[1], 1), packed_offset // n)
