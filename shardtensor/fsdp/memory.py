"""The memory that gathered parameters and packed gradients lie in: made once, lent in turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.comm.copy_engines import gathering
from shardtensor.fsdp.unit import Unit

_LINE = 512  # bytes; where a flat begins in memory
DEPTH = 2
"""Units of a ring that can be gathered at a time: one that computes, one that comes."""


class Slot:
    """Memory for one gathered unit at a time."""

    def __init__(self) -> None:
        self.holder: Unit | None = None


def lend(units: Sequence[Unit]) -> None:
    """Give every unit its memory: a slot of its own where it has to stay gathered, else one of a ring in turns.

    All ranks call it; where the copy engines of GPUs can gather, the memory is made known to all.
    """
    sharers: list[list[Unit]] = [[] for _ in range(DEPTH)]
    turn = 0
    for unit in units:
        if unit.stays_gathered:
            sharers.append([unit])
        else:
            sharers[turn % DEPTH].append(unit)
            turn += 1
    sizes = [max(map(_size, each), default=0) for each in sharers]
    with torch.inference_mode(False):  # else autograd would never take what lies in it
        group, memory = gathering(units[0].domain.shard, sum(sizes), units[0].device)
    start = 0
    for each, size in zip(sharers, sizes, strict=True):
        slot = Slot()
        for unit in each:
            unit.slot = slot
            place = start
            for flat in unit.flats:
                if flat.domain.shard is units[0].domain.shard:
                    flat.gathers_by = group
                flat.lie_in(memory[place:])
                place += _up(flat.whole_bytes)
        start += size


def _size(unit: Unit) -> int:
    return sum(_up(flat.whole_bytes) for flat in unit.flats)


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
