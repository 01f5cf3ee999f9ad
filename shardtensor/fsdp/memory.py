"""The memory that gathered parameters and packed gradients lie in: made once, lent in turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.comm.copy_engines import GatherBuffer, gather_buffer
from shardtensor.fsdp.convoy import Convoy, travelling
from shardtensor.fsdp.unit import Unit

_LINE = 512  # bytes; where a flat begins in memory


class Slot:
    """Memory for one gathered unit at a time."""

    def __init__(self, lent: GatherBuffer) -> None:
        self.holder: Unit | None = None
        self.lease = lent
        self._storage = lent.memory.untyped_storage()
        self._users = 0

    def seal(self) -> None:
        """Count who refers to the memory now: those that it is lent to."""
        self._users = self._count()

    @property
    def is_idle(self) -> bool:
        """Whether nobody else does: no graph waits for its backward."""
        return self._count() <= self._users

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))


@torch.inference_mode(False)  # else autograd would never take what lies in it, nor views of it
def lend(units: Sequence[Unit]) -> None:
    """Give every unit its memory: a slot of its own where it has to stay gathered, else one of a ring in turns.

    The ring has a slot for a unit that computes and for as many as are gathered ahead of it. Small units that travel
    together lie end to end. All ranks call it; where the copy engines of GPUs can gather, the memory is made known to
    all.
    """
    ended = {id(unit.slot.lease): unit.slot.lease for unit in units if unit.slot is not None}
    together = travelling(units)
    travellers = {id(unit) for members in together for unit in members}
    depth = 1 + max([1, *(ahead for unit in units for ahead in unit.ahead)])
    sharers: list[list[Unit]] = [[] for _ in range(depth)]
    turn = 0
    for unit in units:
        if unit.has_own_slot:
            sharers += [] if id(unit) in travellers else [[unit]]
        else:
            sharers[turn % depth].append(unit)
            turn += 1
    _lend_to(sharers, units[0])
    for members in together:
        _lend_to_all_of(Convoy(members))
    for old in ended.values():
        old.end()


def _lend_to(sharers: Sequence[Sequence[Unit]], first: Unit) -> None:
    sizes = [max(map(_size, each), default=0) for each in sharers]
    lent = gather_buffer(first.domain.shard, sum(sizes), first.device)
    slots = []
    start = 0
    for each, size in zip(sharers, sizes, strict=True):
        slots.append(Slot(lent))
        for unit in each:
            unit.slot = slots[-1]
            place = start
            for flat in unit.flats:
                flat.convoy = None
                if flat.domain.shard is first.domain.shard:
                    flat.gathers_by = lent.group
                flat.lie_in(lent.memory[place:])
                flat.make_views()
                place += _up(flat.whole_bytes)
        start += size
    for slot in slots:
        slot.seal()


def _lend_to_all_of(convoy: Convoy) -> None:
    lent = GatherBuffer(convoy.flats[0].domain.shard, convoy.memory)
    place = 0
    for flat in convoy.flats:
        flat.convoy, flat.gathers_by = convoy, flat.domain.shard
        flat.lie_in(convoy.memory[place:])
        place += flat.whole_bytes
    convoy.flats[0].make_views()
    for unit in convoy.units:
        unit.slot = Slot(lent)
    for unit in convoy.units:
        unit.slot.seal()


def _size(unit: Unit) -> int:
    return sum(_up(flat.whole_bytes) for flat in unit.flats)


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
