"""When the units of a model are gathered: just before they run, ahead of the work, or by the user."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from shardtensor.comm.group import Group
from shardtensor.errors import AbsentRankError
from shardtensor.fsdp.autograd import next_generation
from shardtensor.fsdp.buffers import assign_buffers
from shardtensor.fsdp.order import BackwardRoot, ExecutionOrder
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.reducer import BUFFERS, GradientReducer
from shardtensor.fsdp.state import SHARDED, FSDPState
from shardtensor.fsdp.streams import Stream, Streams

_version = attrgetter("shard._version")
_in_backward = torch._C._current_graph_task_id


class Unsharding:
    """The part of `Runtime` that gathers.

    Attributes:
        generation: of parameters' values; another where a gather finds others than the last.
        is_stale: whether options of units have changed that memory depends on.
    """

    states: list[FSDPState]
    streams: Streams
    gathers: Stream
    order: ExecutionOrder
    reducer: GradientReducer
    generation: int
    keeps_some: bool
    is_stale: bool
    _group: Group
    _param_groups: list[ParamGroup]
    _kept_groups: list[ParamGroup]
    _root: BackwardRoot
    _last: FSDPState | None
    _depth: int
    _is_backward: bool
    _has_kept: bool
    _runs_far: bool
    _writes: int

    def _break_off(self) -> None:
        raise NotImplementedError

    # -- in a pass ----------------------------------------------------------------------------------------------------

    def _unshard_for(self, state: FSDPState) -> None:
        order = self.order
        for number in order.visit(state.index, state.is_gathered or not state.param_groups):
            self._gather(number)
        try:
            state.wait()
        except AbsentRankError:
            order.explain(state.index)
            raise
        self._last = state
        if self._runs_far:
            self._run_ahead(order.reach(state.ahead[self._is_backward]))
            return
        ahead = order.ahead(self._is_there_to_stay)
        if ahead is not None and self._is_free(self.states[ahead]):
            self._gather(ahead)

    def _gather(self, index: int) -> None:
        state = self.states[index]
        if state.sharded_state is not SHARDED:
            if self._is_backward:
                self.reducer.skip(state.param_groups)
            return
        holder = state.buffer.holder
        if holder is not None:
            holder.make_room_for(state)
        if self._is_backward:
            for group in state.param_groups:
                group.check_unchanged()
        if self.streams.is_cuda:
            self.gathers.follow()
            with self.gathers:
                state.gather(self._is_backward)
                state.started(self.gathers)
        else:
            state.gather(self._is_backward)
        if self._is_backward:
            self.reducer.skip(state.param_groups)

    def _is_there_to_stay(self, number: int) -> bool:
        state = self.states[number]
        return state.is_gathered and state.has_own_buffer

    def _run_ahead(self, numbers: Sequence[int]) -> None:
        """Gather units in the order of their use, as long as that takes no memory from one of them."""
        for number in numbers:
            state = self.states[number]
            holder = state.buffer.holder
            is_next = holder is not None and holder is not state and holder.is_gathered and holder.index in numbers
            if is_next or not self._is_free(state):
                return
            self._gather(number)

    def _is_free(self, state: FSDPState) -> bool:
        holder = state.buffer.holder
        return holder is None or holder is state or not (holder.is_running or holder is self._last)

    def _gather_what_stays(self, gone: Sequence[FSDPState]) -> None:
        """Gather again, on all ranks, what stayed gathered until an earlier backward of the same forward ended."""
        inside = self._root.states()
        for state in gone:
            if state in inside and all([group.is_unwritten for group in state.param_groups]):
                self._gather(state.index)

    # -- by the user --------------------------------------------------------------------------------------------------

    def unshard(self, state: FSDPState) -> None:
        """Start to gather `state` now, so that its next forward has no need to."""
        is_between = not self._depth and _in_backward() < 0
        if not state.has_own_buffer:
            state.is_asked = self.is_stale = True
        if is_between:
            if self._is_backward:
                self._break_off()
            if self.is_stale:
                self._assign_buffers_anew()
            self._count_writes()
            if not state.is_kept:
                state.sharded_state = SHARDED
        holder = state.buffer.holder
        is_taken = holder is not None and holder.is_kept and not state.has_own_buffer
        if state.is_gathered or is_taken or not self._is_free(state):
            return
        self._gather(state.index)
        if is_between:
            state.is_kept = self._has_kept = True

    def reshard(self, state: FSDPState) -> None:
        """Gather `state` again before its next use."""
        state.is_kept = False
        if not state.is_running:
            state.sharded_state = SHARDED

    # -- from one pass to the next ------------------------------------------------------------------------------------

    def _keep_only(self, states: Sequence[FSDPState]) -> None:
        """Keep these gathered for the next forward, and no others."""
        for state in self.states:
            state.is_kept = state in states
        self._has_kept = bool(states)

    def _still_gathered(self, used: set[FSDPState]) -> list[FSDPState]:
        """Those kept units that were not written to; of them those that are `used` now are not kept further."""
        kept = [
            state
            for state in self.states
            if state.is_kept and state.is_gathered and all(group.is_unwritten for group in state.param_groups)
        ]
        self._keep_only([state for state in kept if state not in used])
        return kept

    def _count_writes(self) -> None:
        writes = sum(map(_version, self._param_groups))
        if writes != self._writes:
            self._writes, self.generation = writes, next_generation()

    def _find_kept_groups(self) -> list[ParamGroup]:
        """Those of units that no backward gathers."""
        return [group for state in self.states if state.stays_gathered for group in state.param_groups]

    def _assign_buffers_anew(self) -> None:
        """Assign buffers by the options as they are now, unless on some rank a graph needs what lies in it."""
        is_idle = all(state.buffer.is_idle for state in self.states)
        if not all(map(any, self._group.exchange(bytes([is_idle])))):
            return  # the next forward tries again
        self.is_stale = False
        self._runs_far = any(ahead != 1 for state in self.states for ahead in state.ahead)
        self.keeps_some = any(state.keeps_after_backward for state in self.states)
        self.order.clear()
        kept = [
            (state, [group.whole for group in state.param_groups])
            for state in self.states
            if state.is_kept and state.is_gathered
        ]
        for state, _ in kept:
            state.wait()
        for state in self.states:
            state.settle()
        self._kept_groups = self._find_kept_groups()
        assign_buffers(self.states)
        self.reducer.resize(max([BUFFERS, *(state.reductions_ahead for state in self.states)]))
        for state in self.states:
            state.sharded_state = SHARDED
            state.make_swaps()
        for state, wholes in kept:
            state.move_from(wholes)
            state.buffer.holder = state
