"""`Schedule`: when the units of a model are gathered, and when their gradients are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch

from shardtensor.comm.untraced import untraced
from shardtensor.fsdp import memory
from shardtensor.fsdp.checks import refuse_transform
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.kept import Kept
from shardtensor.fsdp.outside import UNCOMPILED
from shardtensor.fsdp.passage import Passage
from shardtensor.fsdp.reductions import BUFFERS, Reductions
from shardtensor.fsdp.scope import Scope
from shardtensor.fsdp.streams import Streams
from shardtensor.fsdp.unit import Unit, units_in
from shardtensor.fsdp.upkeep import Upkeep, check_place, take_in
from shardtensor.fsdp.used import Uses, names_of
from shardtensor.fsdp.versions import next_generation, written_too_early

_nothing: Callable[[], Any] = type(None)
_version = attrgetter("shard._version")
_in_backward = torch._C._current_graph_task_id


class Schedule:
    """Made in the first call of a module that no running module holds; it serves all units in that module."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.device = units[0].device
        self.is_current = True
        self.streams, self.gathers = units[0].streams, units[0].streams.lane()
        self._uses = Uses(units[0].domain, names_of(units), self.streams, any(unit.find_unused for unit in units))
        self._flats = [flat for unit in units for flat in unit.flats]
        self.reductions = Reductions(self._flats, self.streams, self._uses, self.touch)
        self._orders: dict[Hashable, list[int]] = {}
        self._group = units[0].domain.whole
        self._passage: Passage | None = None
        self._scope = Scope(units)
        self._last: Unit | None = None  # visited; its parameters are in use
        self._kept_flats = self._find_kept_flats()
        self._depth, self._is_backward, self.has_grad = 0, False, False
        self.generation = next_generation()  # of parameters' values; another where a gather finds others than the last
        self._writes = -1
        self._upkeep = Upkeep(units)
        self._seen_training: dict[Hashable, int] = {}
        self._trains = self._who_train()
        self.reductions.suit(self._trains)
        self._ending: Callable[[], Any] = _nothing  # of the backward that runs: gives None when that broke off
        self._kept = Kept(self._group, self._flats, self.device)
        self.keeps_some = any(unit.keeps_after_backward for unit in units)
        self._offloads = any(flat.is_offloaded for unit in units for flat in unit.flats)
        self._runs_far = any(ahead != 1 for unit in units for ahead in unit.ahead)
        self.is_stale = False
        self.post_optim_event: Any = None

    @classmethod
    def over(cls, entered: Unit) -> Schedule:
        """The schedule of the units in the module that is called."""
        units: list[Unit] = []
        for name, unit in units_in(entered.module):
            unit.index, unit.name = len(units), name
            units.append(unit)
        for unit in units:
            take_in(unit)
            unit.settle()
            if unit.schedule is not None:
                unit.schedule.is_current = False
        check_place(units)
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
        if not self._depth and _in_backward() < 0:
            self._begin(unit)
        if not unit.is_at_hand:
            self._visit(unit)
        self._depth += 1
        if self._passage is not None and self._passage.is_learning:
            self.reductions.used(unit.flats)

    def _begin(self, unit: Unit) -> None:
        refuse_transform(unit)
        if self._is_backward:
            self._break_off()
        self._uses.check(waits=not self.streams.is_cuda)
        if self.is_stale:
            self._lend_anew()
        if self.streams.refresh():  # autograd remembers the stream that a node was made in
            self._make_views()
            for other in self.units:
                other.make_swaps()
        if not self._upkeep.holds():
            self._mend()
        self._count_writes()
        self.has_grad = has_grad = torch.is_grad_enabled()
        if has_grad:
            self._scope.enter(unit)
        if self.post_optim_event is not None:
            self._wait_for_optimizer()
        kind = ("forward", unit.index, has_grad, self._trains)
        self._start_passage(kind, lambda: [each.index for each in self._scope.under((unit.index,))])
        if self.keeps_some:
            self._kept.begin()
        kept = self._kept.take({inner for _, inner in units_in(unit.module)}) if self._kept else ()
        for other in self.units:
            other.is_gathered = other in kept

    def _count_writes(self) -> None:
        writes = sum(map(_version, self._flats))
        if writes != self._writes:
            self._writes, self.generation = writes, next_generation()

    def _wait_for_optimizer(self) -> None:
        """Let gathers wait for the event that the user gave, too; it is good for one forward."""
        if self.device.type == "cuda":
            self.post_optim_event.wait(self.streams.caller)
        self.post_optim_event = None

    def _lend_anew(self) -> None:
        """Lend memory by the options as they are now, unless on some rank a graph needs what lies in it."""
        is_idle = all(unit.slot.is_idle for unit in self.units)
        if not all(map(any, self._group.exchange(bytes([is_idle])))):
            return  # the next forward tries again
        self.is_stale = False
        self._runs_far = any(ahead != 1 for unit in self.units for ahead in unit.ahead)
        self.keeps_some = any(unit.keeps_after_backward for unit in self.units)
        self._orders.clear()
        self._passage = None
        kept = [(unit, [flat.whole for flat in unit.flats]) for unit in self._kept.units() if unit.is_gathered]
        for unit, _ in kept:
            unit.wait()
        for unit in self.units:
            unit.settle()
        self._kept_flats = self._find_kept_flats()
        memory.lend(self.units)
        self.reductions.resize(max([BUFFERS, *(unit.reductions_ahead for unit in self.units)]))
        for unit in self.units:
            unit.is_gathered = False
            unit.make_swaps()
        for unit, wholes in kept:
            unit.move_from(wholes)
            unit.slot.holder = unit

    # -- gathering by the user ----------------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Start to gather `unit` now, so that its next forward has no need to."""
        is_between = not self._depth and _in_backward() < 0
        if not unit.has_own_slot:
            unit.is_asked = self.is_stale = True
        if is_between:
            if self._is_backward:
                self._break_off()
            if self.is_stale:
                self._lend_anew()
            self._count_writes()
            if unit not in self._kept:
                unit.is_gathered = False
        if unit.is_gathered or not self._is_free(unit) or (unit.slot.holder in self._kept and not unit.has_own_slot):
            return
        self._gather(unit.index)
        if is_between:
            self._kept.keep(unit)

    def reshard(self, unit: Unit) -> None:
        """Have `unit` gathered again before its next use."""
        self._kept.drop(unit)
        if not unit.is_running:
            unit.is_gathered = False

    def reset(self) -> None:
        """Forget all that a broken forward or backward left, and gradients that wait."""
        self._depth, self._last = 0, None
        self._break_off()
        for unit in self.units:
            self.reshard(unit)
            unit.finish()
            for flat in unit.flats:
                flat.carry.drop()
        self.gathers.join()

    def _mend(self) -> None:
        """Take in what was done to the modules' parameters since the last forward."""
        self.generation = next_generation()
        for unit in self.units:
            take_in(unit)
        check_place(self.units)
        if not self.reductions.fits():  # complete conversions were taken in already, when they were made
            self._orders.clear()
            self._kept.keep_only(())
            memory.lend(self.units)
            self.reductions = Reductions(self._flats, self.streams, self._uses, self.touch, self.reductions.buffers)
            self.reductions.suit(self._trains)
        trains = self._who_train()
        if trains != self._trains:
            self._trains = trains
            self.reductions.suit(trains)
            self._make_views()
        for unit in self.units:
            unit.make_swaps()
        self._upkeep = Upkeep(self.units)

    def _make_views(self) -> None:
        for flat in {id(flat.convoy or flat): flat for flat in self._flats}.values():
            flat.make_views()

    def _who_train(self) -> int:
        """A number for which parameters require a gradient now."""
        return self._seen_training.setdefault(tuple(flat.trains for flat in self._flats), len(self._seen_training))

    def _start_passage(self, kind: Hashable, units: Callable[[], Sequence[int]]) -> None:
        pick = max if self._is_backward else min
        sent, hear = self.reductions.count, self.reductions.hear
        self._passage = Passage(self._orders, kind, self._group, self._gather, units, pick, self._skip, sent, hear)

    def _find_kept_flats(self) -> list[Flat]:
        """Those of units that no backward gathers."""
        kept = [unit for unit in self.units if unit.stays_gathered or not unit.is_needed_in_backward]
        return [flat for unit in kept for flat in unit.flats]

    def is_running(self) -> bool:
        """Whether a forward or a backward of its modules is going on."""
        return self._depth > 0 or _in_backward() >= 0

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
        if self._offloads:
            self.gathers.synchronize()  # what is written to shards on the CPU from now on is for the next pass

    def abandon(self, unit: Unit) -> None:
        """Go on after a forward that raised."""
        self._depth -= 1

    def _visit(self, unit: Unit) -> None:
        passage = self._passage
        assert passage is not None
        passage.visit(unit.index)
        if not unit.is_gathered:
            self._gather(unit.index)  # this pass goes another way; on all ranks, or collectives do not meet
        unit.wait()
        self._last = unit
        if self._runs_far:
            self._run_ahead(passage.reach(unit.ahead[self._is_backward]))
            return
        ahead = passage.ahead(self._is_there_to_stay)
        if ahead is not None and self._is_free(self.units[ahead]):
            self._gather(ahead)

    def _skip(self, index: int) -> None:
        if self._is_backward:
            self.reductions.skip(self.units[index].flats)

    def _is_there_to_stay(self, number: int) -> bool:
        unit = self.units[number]
        return unit.is_gathered and unit.has_own_slot

    def _run_ahead(self, numbers: Sequence[int]) -> None:
        """Gather units in the order of their use, as long as that takes no memory from one of them."""
        for number in numbers:
            unit = self.units[number]
            holder = unit.slot.holder
            is_next = holder is not None and holder is not unit and holder.is_gathered and holder.index in numbers
            if is_next or not self._is_free(unit):
                return
            self._gather(number)

    def _is_free(self, unit: Unit) -> bool:
        holder = unit.slot.holder
        return holder is None or holder is unit or not (holder.is_running or holder is self._last)

    def _gather(self, index: int) -> None:
        unit = self.units[index]
        if unit.is_gathered:
            if self._is_backward:
                self.reductions.pass_by(unit.flats)
            return
        holder = unit.slot.holder
        if holder is not None:
            holder.make_room_for(unit)
        if self._is_backward:
            for flat in unit.flats:
                flat.check_unchanged()
        if self.streams.is_cuda:
            self.gathers.follow()
            with self.gathers:
                unit.gather(self._is_backward)
                unit.started(self.gathers)
        else:
            unit.gather(self._is_backward)
        if self._is_backward:
            self.reductions.pass_by(unit.flats)

    # -- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, generation: int) -> None:
        """Have `unit` gathered when its backward is about to begin, of a forward with this generation of values."""
        if generation != self.generation:
            raise written_too_early(entry for flat in unit.flats for entry in flat.entries)
        self.touch()
        if not (unit.is_at_hand or unit.skips_backward):
            self._visit(unit)

    @untraced(UNCOMPILED)
    def touch(self, grad: torch.Tensor | None = None) -> None:
        """Take part in a backward, though it may go through no unit here; as a hook on a tensor, for one."""
        if self._is_backward and self._ending() is None:
            self._break_off()
        if not self._is_backward:
            self._begin_backward()

    def _begin_backward(self) -> None:
        def end() -> None:  # lives as long as autograd's task
            self._end_backward()

        self._is_backward, self._ending = True, weakref.ref(end, self._ended)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._scope.begin()
        self._start_passage(("backward", self._scope.entered, self._trains), self._scope.gathered_again)
        assert self._passage is not None
        self.reductions.begin(self._scope.entered, self._scope.flats, self._passage.is_learning)
        gone = [unit for unit in self.units if unit.stays_gathered and not unit.is_gathered and unit.flats]
        if gone:
            self._gather_what_stays(gone)
        self.reductions.pass_by(self._kept_flats)

    def _gather_what_stays(self, gone: Sequence[Unit]) -> None:
        """Gather again, on all ranks, what stayed gathered until an earlier backward of the same forward ended."""
        inside = self._scope.units()
        for unit in gone:
            if unit in inside and all([flat.is_unwritten for flat in unit.flats]):
                self._gather(unit.index)

    def _ended(self, _: Any) -> None:
        """Show sharded parameters when autograd's task is gone that broke off."""
        if self._is_backward:
            self._show_shells()

    def _show_shells(self) -> None:
        for unit in self.units:
            if unit.is_in_backward:
                unit.end_backward()

    def _break_off(self) -> None:
        """Leave a backward that an error ended."""
        self._is_backward = False
        self._show_shells()
        self.reductions.drop()

    @untraced(UNCOMPILED)
    def _end_backward(self) -> None:
        self._show_shells()
        assert self._passage is not None
        try:
            self._passage.end()
            self._is_backward = False
            self.reductions.end()
        except BaseException:
            self._is_backward = True  # broken off, by a hook perhaps: the next forward drops what is left
            raise
        self.gathers.join()
        kept = set(self._keep_gathered()) if self.keeps_some or self._kept else ()
        for unit in self.units:
            unit.is_gathered = unit in kept

    def _keep_gathered(self) -> list[Unit]:
        """Keep what is to stay gathered after a backward."""
        kept = [u for u in self.units if u.is_gathered and (u.keeps_after_backward or u in self._kept)]
        self._kept.keep_only(kept)
        return kept
