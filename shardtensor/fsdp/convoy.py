"""`Convoy`: small units that are gathered in one message, where one for each would take longer to start than to run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from shardtensor.comm.group import Pending
from shardtensor.fsdp.side_by_side import SideBySide
from shardtensor.fsdp.unit import Unit
from shardtensor.plan.match.units import convoys


class Convoy:
    """Units of one flat each, all gathered when the first of them is.

    Their ranges travel side by side, and are dealt out to where each unit is gathered. Who holds what is as without it.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.flats = [unit.flats[0] for unit in units]
        first = self.flats[0]
        self._group = first.domain.shard
        chunks = [flat.ranges.chunk for flat in self.flats]
        count, dtype = self._group.size * sum(chunks), first.compute_dtype
        self._sent, whole = (torch.empty(count, dtype=dtype, device=first.device) for _ in range(2))
        self._own = self._sent.view(self._group.size, -1)[self._group.index]
        self._order = SideBySide(chunks, whole, self._sent)
        self.memory = whole.view(torch.uint8)
        self._started: Pending | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that its flats travel in, and that they are dealt out to."""
        return self._sent.nbytes + self.memory.nbytes

    def is_ready(self, is_again: bool) -> bool:
        """Whether all can be gathered: none is already, nor, to be gathered again, was written since."""
        if any([unit.is_gathered for unit in self.units]):
            return False
        return not is_again or all([flat.is_unwritten for flat in self.flats])

    def gather(self) -> Pending:
        """Start to gather all; the caller chose the stream."""
        ranges = [flat.present_range() for flat in self.flats]
        torch.cat(ranges, out=self._own)
        self._started = self._group.all_gather_into(self._sent, self._own)
        if self._sent.is_cuda:
            self.wait()  # in the stream, that is
        return self

    def wait(self) -> torch.Tensor:
        """Let each unit have what was gathered of it."""
        started, self._started = self._started, None
        if started is not None:
            started.wait()
            self._order.deal()
        return self._sent


def travelling(units: Sequence[Unit]) -> list[list[Unit]]:
    """The units that travel together, by what is known of them before their memory is lent."""
    return [[units[i] for i in members] for members in convoys([_kind(unit) for unit in units])]


def _kind(unit: Unit) -> tuple[Hashable, int] | None:
    is_small = unit.stays_gathered and not unit.is_container and unit.reshard_after_forward is None
    if not is_small or unit.is_asked or unit.keeps_after_backward or len(unit.flats) != 1:
        return None
    flat, domain = unit.flats[0], unit.domain
    if flat.is_offloaded or domain.shard.size == 1 or not flat.whole_bytes:
        return None
    ranks = domain.shard.ranks, None if domain.replicate is None else domain.replicate.ranks  # the same on all of them
    return (*ranks, flat.dtype, flat.compute_dtype, flat.reduce_dtype), flat.whole_bytes
