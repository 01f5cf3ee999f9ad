"""`Schedule`: when the units of a model are gathered, and when their gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from shardtensor.fsdp import memory
from shardtensor.fsdp.passage import Passage
from shardtensor.fsdp.reductions import Reductions
from shardtensor.fsdp.streams import Streams
from shardtensor.fsdp.unit import Unit, units_in
from shardtensor.fsdp.used import Uses, names_of

_in_backward = torch._C._current_graph_task_id


class Schedule:
    """Made in the first call of a module that no running module holds; it serves all units in that module."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.device = units[0].device
        self.is_current = True
        self.streams = units[0].streams
        self.gathers = self.streams.lane()
        uses = Uses(units[0].domain, names_of(units), self.streams, any(unit.find_unused for unit in units))
        self.reductions = Reductions([flat for unit in units for flat in unit.flats], self.streams, uses)
        self._orders: dict[Hashable, list[int]] = {}
        self._group = units[0].domain.whole
        self._passage: Passage | None = None
        self._entered: set[int] = set()  # units that were called from outside since the last backward
        self._scope: tuple[int, ...] = ()  # those whose forwards the backward is of
        self._last: Unit | None = None  # visited; its parameters are in use
        self._kept_flats = [flat for unit in units if unit.stays_gathered for flat in unit.flats]
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
        self.reductions.uses.check(waits=not self.streams.is_cuda)
        if self.streams.refresh():  # autograd remembers the stream that a node was made in
            for other in self.units:
                for flat in other.flats:
                    flat.make_views()
                other.make_swaps()
        has_grad = torch.is_grad_enabled()
        if has_grad:
            self._entered.add(unit.index)
        self._start_passage((unit.index, has_grad), lambda: self._under([unit.index]))
        for other in self.units:
            other.is_gathered = other.is_gathered and other.is_kept

    def _start_passage(self, kind: Hashable, units: Callable[[], Sequence[int]]) -> None:
        self._passage = Passage(self._orders, kind, self._group, self._gather, units)

    def _under(self, entered: Sequence[int]) -> list[int]:
        """The units in the modules of these, these among them."""
        return sorted({unit.index for index in entered for _, unit in units_in(self.units[index].module)})

    def _flats_under(self) -> list[int]:
        """The numbers of the flats that the backward may reach."""
        return [i for index in self._under(self._scope) for i in self.reductions.numbers(self.units[index].flats)]

    def _regathered(self) -> list[int]:
        """The units that a backward may have to gather again, in the order of a backward."""
        units = [self.units[index] for index in self._under(self._scope)]
        again = [unit for unit in units if not unit.stays_gathered and any(flat.trains for flat in unit.flats)]
        return [unit.index for unit in reversed(again)]

    def leave(self, unit: Unit) -> None:
        """Go on after the forward of `unit`."""
        self._depth -= 1
        if self._depth or _in_backward() >= 0 or self._passage is None:
            return
        passage = self._passage
        passage.end()
        if passage.is_learning:
            among = [i for unit in self.units for i in self.reductions.numbers(unit.flats)]
            self.reductions.agree_on_use(self._group, among)
        if not torch.is_grad_enabled():
            self.gathers.join()

    def abandon(self, unit: Unit) -> None:
        """Go on after a forward that raised."""
        self._depth -= 1

    def _visit(self, unit: Unit) -> None:
        if unit.is_gathered and unit.stays_gathered and unit.is_ready:
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
            holder.let_go()
        unit.slot.holder = unit
        if self._is_backward:
            for flat in unit.flats:
                flat.check_unchanged()
        self.gathers.follow()
        with self.gathers:
            unit.gather()
            unit.started(self.gathers)
        if self._is_backward:
            self.reductions.pass_by(unit.flats)

    # -- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit) -> None:
        """Have `unit` gathered when its backward is about to begin."""
        if not self._is_backward:
            self._is_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if self._entered:
                self._scope, self._entered = tuple(sorted(self._entered)), set()
            self._start_passage(("backward", self._scope), self._regathered)
            self.reductions.begin(self._scope, self._flats_under)
            self.reductions.pass_by(self._kept_flats)
        self._visit(unit)

    def _end_backward(self) -> None:
        self._is_backward = False
        assert self._passage is not None
        self._passage.end()
        self.reductions.end()
        self.gathers.join()
        for unit in self.units:
            unit.is_gathered = unit.is_gathered and unit.is_kept
