"""The memory that gathered parameters and packed gradients lie in: made once, lent in turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.fsdp.unit import Unit

_LINE = 512  # bytes; where a flat begins in memory
DEPTH = 2
"""Units of a ring that can be gathered at a time: one that computes, one that comes."""


class Slot:
    """Memory for one gathered unit at a time."""

    def __init__(self) -> None:
        self.holder: Unit | None = None


def lend(units: Sequence[Unit]) -> None:
    """Give every unit its memory: a slot of its own where it has to stay gathered, else one of a ring in turns."""
    ring: list[list[Unit]] = [[] for _ in range(DEPTH)]
    turn = 0
    for unit in units:
        if unit.stays_gathered:
            _lend_slot([unit])
        else:
            ring[turn % DEPTH].append(unit)
            turn += 1
    for sharers in ring:
        _lend_slot(sharers)


def _lend_slot(sharers: Sequence[Unit]) -> None:
    if not sharers:
        return
    slot = Slot()
    device = sharers[0].device
    with torch.inference_mode(False):  # else autograd would never take it
        memory = torch.empty(max(_size(unit) for unit in sharers), dtype=torch.uint8, device=device)
    for unit in sharers:
        unit.slot = slot
        start = 0
        for flat in unit.flats:
            flat.lie_in(memory[start:])
            start += _up(flat.whole_bytes)


def _size(unit: Unit) -> int:
    return sum(_up(flat.whole_bytes) for flat in unit.flats)


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
