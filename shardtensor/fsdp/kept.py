"""`Kept`: units that stay gathered from one pass to the next, until something is written to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardtensor.comm.group import Group

if TYPE_CHECKING:
    from shardtensor.fsdp.flat import Flat
    from shardtensor.fsdp.unit import Unit


class Kept:
    """Units whose next forward need not gather them, with what tells whether they were written to.

    On the CPU the ranks compare values, so that every write is found, wherever it was made, and say so to each other
    in one byte a unit. On cuda that would make the host wait; there version counters and steps of optimizers tell.
    """

    def __init__(self, group: Group, flats: Sequence[Flat], device: torch.device) -> None:
        self.group, self._flats, self._is_cuda = group, flats, device.type == "cuda"
        self._seen: dict[Unit, Any] = {}
        self._begun = (0, 0)

    def __bool__(self) -> bool:
        return bool(self._seen)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._seen

    def begin(self) -> None:
        """Take note that a pass begins, in which units may be gathered that are kept afterwards."""
        if self._is_cuda:
            _Steps.watch()
            self._begun = self._generation()

    def keep(self, unit: Unit) -> None:
        """Keep a unit that is being gathered."""
        self.begin()
        self._seen[unit] = self._begun

    def keep_only(self, units: Iterable[Unit]) -> None:
        """Keep these, as they were when they were gathered, and no others."""
        self._seen = {unit: self._seen.get(unit) or self._begun for unit in units}

    def units(self) -> list[Unit]:
        """Those that are kept."""
        return list(self._seen)

    def drop(self, unit: Unit) -> None:
        """Keep a unit no longer."""
        self._seen.pop(unit, None)

    def take(self, used: set[Unit]) -> list[Unit]:
        """Those that nothing was written to; those among them that are `used` now are not kept further."""
        units = [unit for unit in self._seen if unit.is_gathered]
        fresh = [self._is_fresh(unit) for unit in units]
        if not self._is_cuda:
            found = self.group.exchange(bytes(fresh))
            fresh = [all(told) for told in zip(*found, strict=True)]
        units = [unit for unit, is_fresh in zip(units, fresh, strict=True) if is_fresh]
        self._seen = {unit: self._seen[unit] for unit in units if unit not in used}
        return units

    def _is_fresh(self, unit: Unit) -> bool:
        if self._is_cuda:
            return bool(self._seen[unit] == self._generation())
        unit.finish()
        return all(flat.is_as_gathered() for flat in unit.flats)

    def _generation(self) -> tuple[int, int]:
        return sum(flat.writes for flat in self._flats), _Steps.count


class _Steps:
    """Steps that optimizers of this process made since somebody first wanted to know."""

    count = 0
    _handle: Any = None

    @classmethod
    def watch(cls) -> None:
        """Count from now on."""
        if cls._handle is None:
            cls._handle = register_optimizer_step_post_hook(cls._counted)

    @classmethod
    def _counted(cls, *_: Any) -> None:
        cls.count += 1
