"""The memory that gathered parameters and packed gradients lie in: made once, lent in turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.fsdp.unit import Unit

_LINE = 512  # bytes; where a flat begins in memory


class Slot:
    """Memory for one gathered unit at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.holder: Unit | None = None
        self._storage = memory.untyped_storage()
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


def lend(units: Sequence[Unit]) -> None:
    """Give every unit its memory: a slot of its own where it has to stay gathered, else one of a ring in turns.

    The ring has a slot for a unit that computes and for as many as are gathered ahead of it.
    """
    depth = 1 + max([1, *(ahead for unit in units for ahead in unit.ahead)])
    ring: list[list[Unit]] = [[] for _ in range(depth)]
    turn = 0
    for unit in units:
        if unit.has_own_slot:
            _lend_slot([unit])
        else:
            ring[turn % depth].append(unit)
            turn += 1
    for sharers in ring:
        _lend_slot(sharers)


def _lend_slot(sharers: Sequence[Unit]) -> None:
    if not sharers:
        return
    device = sharers[0].device
    with torch.inference_mode(False):  # else autograd would never take it, nor views of it
        _fill_slot(sharers, device)


def _fill_slot(sharers: Sequence[Unit], device: torch.device) -> None:
    memory = torch.empty(max(_size(unit) for unit in sharers), dtype=torch.uint8, device=device)
    slot = Slot(memory)
    for unit in sharers:
        unit.slot = slot
        start = 0
        for flat in unit.flats:
            flat.lie_in(memory[start:])
            start += _up(flat.whole_bytes)
    del memory
    slot.seal()


def _size(unit: Unit) -> int:
    return sum(_up(flat.whole_bytes) for flat in unit.flats)


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
