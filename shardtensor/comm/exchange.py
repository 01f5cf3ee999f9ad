"""The steps that send elements: one collective each, directly from and to local memory if its parts lie in order.

The copies are computed once for each step and strides of the local tensor; a call then costs the host little more than
the copies and the collective themselves. CUDA copies strided memory element by element, so the copies use words as
wide as their alignment allows: elements of two bytes would leave most of the bandwidth unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.route import Region, Step, transfer


def see(local: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a view of a region of a local tensor."""
    held = local[region.held] if region.held else local
    return held if region.shape is None else held.view(region.shape)[region.within]


def are_adjacent(pieces: Sequence[torch.Tensor]) -> bool:
    """Return whether pieces lie in memory end to end, in their order."""
    at = pieces[0].storage_offset() if pieces else 0
    for piece in pieces:
        if not piece.is_contiguous() or piece.storage_offset() != at or piece.is_conj() or piece.is_neg():
            return False
        at += piece.numel()
    return True


WIDEST = 16
"""Bytes of the widest word."""
_WORDS = {WIDEST: torch.complex128, 8: torch.int64}  # any dtype that is copied as it is

Pair = tuple[torch.Tensor, torch.Tensor]


class Strided(NamedTuple):
    """The same number of places in two memories, strides and offsets in words."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    other_stride: tuple[int, ...]
    other_offset: int


class Copies(NamedTuple):
    """The copies between two tensors, in words of a dtype (None: in elements) that hold `per_word` elements."""

    pieces: tuple[Strided, ...]
    per_word: int = 1
    word: torch.dtype | None = None

    def between(self, one: torch.Tensor, other: torch.Tensor) -> list[Pair]:
        """Return the pieces as views of the two tensors; offsets count from where each tensor starts."""
        if self.word is not None:
            one, other = self._in_words(one), self._in_words(other)
        start, other_start = one.storage_offset(), other.storage_offset()
        return [
            (one.as_strided(size, stride, start + at), other.as_strided(size, other_stride, other_start + other_at))
            for size, stride, at, other_stride, other_at in self.pieces
        ]

    def _in_words(self, t: torch.Tensor) -> torch.Tensor:
        assert self.word is not None
        if t.dim() and t.shape[-1] % self.per_word == 0 and t.numel():
            return t.view(self.word)
        return t.view(-1)[: t.numel() // self.per_word * self.per_word].view(self.word)


def end_to_end(views: Iterable[torch.Tensor]) -> list[Pair]:
    """Pair each view with its place in one packed buffer, on the meta device."""
    pairs, at = [], 0
    for view in views:
        place = torch.empty(0, device="meta")
        pairs.append((view, place.as_strided(view.shape, torch.empty(view.shape, device="meta").stride(), at)))
        at += view.numel()
    return pairs


def copies(pairs: Sequence[Pair], item: int, misplaced: int | None) -> Copies:
    """Compute the copies between pairs of views of equal shapes, all of two tensors with `item` bytes an element.

    `misplaced` is the offset of the start of either tensor from a whole widest word, in bytes; None if words are of
    no use: if a tensor is not contiguous, and on the CPU.
    """
    pieces = _merged(pairs)
    for width, word in _WORDS.items() if misplaced is not None else ():
        if misplaced is not None and misplaced % width == 0 and item < width:
            n = width // item
            wide = tuple(piece for narrow in pieces if (piece := _widened(narrow, n)) is not None)
            if len(wide) == len(pieces):
                return Copies(wide, n, word)
    return Copies(pieces)


def misplacement(t: torch.Tensor) -> int | None:
    """Return the `misplaced` of `copies` for a tensor."""
    if not t.is_cuda or not t.is_contiguous():
        return None
    at = int(t.storage_offset()) * t.element_size() % WIDEST  # torch views words only at a whole number of them
    if torch.compiler.is_compiling():
        return at
    return at if t.data_ptr() % WIDEST == at else 1  # memory that torch did not allocate may start anywhere


def _merged(pairs: Sequence[Pair]) -> tuple[Strided, ...]:
    """Merge runs of equal views at equal distances in both tensors into one view with one more dim."""
    pieces: list[Strided] = []
    k = 0
    while k < len(pairs):
        one, other = pairs[k]
        run, distance = 1, (0, 0)
        while k + run < len(pairs):
            next_one, next_other = pairs[k + run]
            gap = _distance(one, next_one), _distance(other, next_other)
            is_alike = next_one.shape == one.shape and next_one.stride() == one.stride()
            if not is_alike or next_other.stride() != other.stride() or min(gap) < 0:
                break
            if run > 1 and gap != (run * distance[0], run * distance[1]):
                break
            distance, run = gap if run == 1 else distance, run + 1
        if one.numel():
            strides = (distance[0], *one.stride()), (distance[1], *other.stride())
            at, other_at = int(one.storage_offset()), int(other.storage_offset())
            pieces.append(Strided((run, *one.shape), strides[0], at, strides[1], other_at))
        k += run
    return tuple(pieces)


def _distance(one: torch.Tensor, other: torch.Tensor) -> int:
    return int(other.storage_offset()) - int(one.storage_offset())


def _widened(piece: Strided, n: int) -> Strided | None:
    """Return a piece in words of n elements; None where its rows do not start and end with whole words."""
    size, stride, at, other_stride, other_at = piece
    if len(size) < 2 or stride[-1] != 1 or other_stride[-1] != 1:
        return None
    if any(x % n for x in (size[-1], at, other_at, *stride[:-1], *other_stride[:-1])):
        return None
    outer, other_outer = tuple(x // n for x in stride[:-1]), tuple(x // n for x in other_stride[:-1])
    return Strided((*size[:-1], size[-1] // n), (*outer, 1), at // n, (*other_outer, 1), other_at // n)


MOST = 1024
"""Exchanges kept for one group; when there are more, all are dropped."""


class Side(NamedTuple):
    """The elements to send, or to receive: `counts` of the parts for single members, and `total`. If `in_order`, they
    lie end to end from element `start` on; else `copies` pair them with a packed buffer."""

    counts: list[int]
    total: int
    in_order: bool
    start: int
    copies: Copies


class Plan(NamedTuple):
    """One rank's part of an exchange; it keeps `step`, so that no other step gets its id."""

    step: Step
    shape: tuple[int, ...]
    send: Side
    recv: Side


def exchange(local: torch.Tensor, step: Step, subgroup: Group, rank: int) -> torch.Tensor:
    """Return this rank's local tensor after an all-gather, a reduce-scatter or an all-to-all; no gradient.

    All ranks of `subgroup` call it. A rank's own pieces are sent too. A side that lies in order needs no copy: the
    receiving side if rows become columns, the sending side if columns become rows.
    """
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    plan = _plan(local, step, subgroup, rank)
    send, recv = plan.send, plan.recv
    if send.in_order:
        sent = local.as_strided((send.total,), (1,), local.storage_offset() + send.start)
    else:  # first: the host does the rest while the copies run
        sent = local.new_empty(send.total)
        for strided, packed in send.copies.between(local, sent):
            packed.copy_(strided)
    if step.kind in ("all_gather", "reduce_scatter"):
        is_gather = step.kind == "all_gather"
        received = subgroup.all_gather(sent) if is_gather else subgroup.reduce_scatter(sent, send.counts)
        if recv.in_order:
            return received.view(plan.shape)
        out = local.new_empty(plan.shape)
    else:
        out = local.new_empty(plan.shape)
        received = out.view(-1)[: recv.total] if recv.in_order else local.new_empty(recv.total)
        subgroup.all_to_all(sent, send.counts, recv.counts, received)
    if not recv.in_order:
        for strided, packed in recv.copies.between(out, received):
            strided.copy_(packed)
    return out


def _plan(local: torch.Tensor, step: Step, subgroup: Group, rank: int) -> Plan:
    kept = subgroup.__dict__.get("_exchanges")
    if kept is None:
        kept = subgroup.__dict__["_exchanges"] = {}
    misplaced = misplacement(local)
    key = (id(step), rank, local.stride(), local.element_size(), misplaced)
    plan = kept.get(key)
    if plan is None:
        if len(kept) >= MOST:
            kept.clear()
        plan = kept[key] = _planned(local, step, subgroup, rank, misplaced)
    return plan


def _planned(local: torch.Tensor, step: Step, subgroup: Group, rank: int, misplaced: int | None) -> Plan:
    members = subgroup.ranks
    if step.kind == "reduce_scatter":
        kept = {peer: transfer(step.source, step.target, peer, (peer,)).keeps for peer in members}
        sends = [tuple(here for here, _ in kept[peer]) for peer in members]
        receives = [tuple(there for _, there in kept[rank])]
    else:
        moves = transfer(step.source, step.target, rank, members)
        sends, receives = list(moves.sends), list(moves.receives)
        if moves.keeps:
            own = members.index(rank)
            sends[own], receives[own] = zip(*moves.keeps, strict=True)
        if step.kind == "all_gather":  # every member gets the same elements
            sends = [sends[members.index(rank)]]
    shape = step.target.local_shape(rank)
    old = torch.empty_strided(step.source.local_shape(rank), local.stride(), device="meta")
    new = torch.empty(shape, device="meta")
    sides = []
    # A new tensor starts with a whole word.
    for x, regions_by_peer, at in ((old, sends, misplaced), (new, receives, 0 if local.is_cuda else None)):
        views = [see(x, region) for regions in regions_by_peer for region in regions]
        counts = [sum(region.numel for region in regions) for regions in regions_by_peer]
        start = int(views[0].storage_offset()) if views else 0
        side_copies = copies(end_to_end(views), local.element_size(), at)
        sides.append(Side(counts, sum(counts), are_adjacent(views), start, side_copies))
    return Plan(step, shape, *sides)
