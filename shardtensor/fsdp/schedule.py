"""`Schedule`: when the units of a model are gathered, and when their gradients are reduced."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from shardtensor.fsdp import memory
from shardtensor.fsdp.passage import Passage
from shardtensor.fsdp.reductions import Reductions
from shardtensor.fsdp.streams import Streams
from shardtensor.fsdp.unit import Unit, units_in

_in_backward = torch._C._current_graph_task_id


class Schedule:
    """Made in the first call of a module that no running module holds; it serves all units in that module."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.device = units[0].device
        self.is_current = True
        self.streams = units[0].streams
        self.gathers = self.streams.lane()
        self.reductions = Reductions([flat for unit in units for flat in unit.flats], self.streams)
        self._orders: dict[Hashable, list[int]] = {}
        self._group = units[0].domain.whole
        self._passage: Passage | None = None
        self._entered: Unit | None = None
        self._last: Unit | None = None  # visited; its parameters are in use
        self._depth = 0
        self._is_backward = False

    @classmethod
    def over(cls, entered: Unit) -> Schedule:
        """The schedule of the units in the module that is called."""
        units: list[Unit] = []
        for name, unit in units_in(entered.module):
            unit.index, unit.name = len(units), name
            units.append(unit)
        for unit in units:
            unit.settle()
            if unit.schedule is not None:
                unit.schedule.is_current = False
        memory.lend(units)
        streams = Streams(entered.device)
        for unit in units:
            unit.use(streams)
        schedule = cls(units)
        for unit in units:
            unit.schedule = schedule
            unit.make_swaps()
        return schedule

    # -- forward ----------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """Have `unit` gathered when its forward is about to begin."""
        if _in_backward() < 0 and not self._depth:
            self._begin(unit)
        self._depth += 1
        self._visit(unit)
        if self._passage is not None and self._passage.is_learning:
            self.reductions.used(unit.flats)

    def _begin(self, unit: Unit) -> None:
        if self._is_backward:  # an error broke it off
            self._is_backward = False
            self.reductions.drop()
        if self.streams.refresh():  # autograd remembers the stream that a node was made in
            for other in self.units:
                for flat in other.flats:
                    flat.make_views()
                other.make_swaps()
        self._entered = unit
        self._start_passage((unit.index, torch.is_grad_enabled()))
        for other in self.units:
            other.is_gathered = other.is_gathered and other.is_kept

    def _start_passage(self, kind: Hashable) -> None:
        self._passage = Passage(self._orders, kind, self._group, self._gather)

    def leave(self, unit: Unit) -> None:
        """Go on after the forward of `unit`."""
        self._depth -= 1
        if self._depth or _in_backward() >= 0 or self._passage is None:
            return
        passage = self._passage
        passage.end()
        if passage.is_learning:
            self.reductions.agree_on_use(self._group)
        if not torch.is_grad_enabled():
            self.gathers.join()

    def abandon(self, unit: Unit) -> None:
        """Go on after a forward that raised."""
        self._depth -= 1

    def _visit(self, unit: Unit) -> None:
        if unit.is_ready and unit.is_gathered and unit.stays_gathered:
            return
        passage = self._passage
        assert passage is not None
        passage.visit(unit.index)
        if not unit.is_gathered:
            self._gather(unit.index)  # this pass goes another way; on all ranks, or collectives do not meet
        unit.wait()
        self._last = unit
        ahead = passage.ahead()
        if ahead is not None and self._is_free(self.units[ahead]):
            self._gather(ahead)

    def _is_free(self, unit: Unit) -> bool:
        holder = unit.slot.holder
        return holder is None or holder is unit or not (holder.is_running or holder is self._last)

    def _gather(self, index: int) -> None:
        unit = self.units[index]
        if unit.is_gathered:
            return
        holder = unit.slot.holder
        if holder is not None:
            holder.is_gathered = False
        unit.slot.holder = unit
        if self._is_backward:
            for flat in unit.flats:
                flat.check_unchanged()
        self.gathers.follow()
        with self.gathers:
            unit.gather()
            unit.started(self.gathers)

    # -- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit) -> None:
        """Have `unit` gathered when its backward is about to begin."""
        if not self._is_backward:
            self._is_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            entered = self._entered
            self._start_passage(("backward", None if entered is None else entered.index))
            self.reductions.begin(self._group)
        self._visit(unit)

    def _end_backward(self) -> None:
        self._is_backward = False
        assert self._passage is not None
        try:
            self._passage.end()
            self.reductions.end()
        except BaseException:
            self._is_backward = True  # broken off, by a hook perhaps: the next forward drops what is left
            raise
        self.gathers.join()
        for unit in self.units:
            unit.is_gathered = unit.is_gathered and unit.is_kept
