"""`Runtime`: one for each model; it gathers parameters for forward and backward, ahead of their use or on demand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

import torch

from shardtensor.comm.streams import Streams
from shardtensor.comm.untraced import untraced
from shardtensor.errors import AbsentRankError
from shardtensor.fsdp.autograd import next_generation, written_too_early
from shardtensor.fsdp.checks import ParameterWatch, check_device, refuse_transform, reset_sharded_params
from shardtensor.fsdp.order import BackwardScope, ExecutionOrder
from shardtensor.fsdp.outside import UNCOMPILED
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.reducer import GradientReducer
from shardtensor.fsdp.state import SHARDED, UNSHARDED, FSDPState, assign_buffers, states_in
from shardtensor.fsdp.unused import UnusedCheck, names_of
from shardtensor.layout.ranges import REDUCE_BUFFERS

_in_backward = torch._C._current_graph_task_id
_version = attrgetter("shard._version")


class Runtime:
    """Made in the first call of an outermost module, inside no other running one; shared by all states in that module.

    Attributes:
        states: of the modules, outer ones first.
        is_current: False after `free_gathered`, or after another runtime was made that has one of its states.
        is_stale: whether options on which buffers depend have changed.
        has_grad: whether the present forward, or the last one, was called with gradients enabled.
        generation: of the parameters' values; it changes if they were written since the last all-gather.
        post_optim_event: `FSDPModule.set_post_optim_event`.
    """

    def __init__(self, states: list[FSDPState]) -> None:
        self.states = states
        self.is_current, self.is_stale, self.has_grad = True, False, False
        self.streams = states[0].streams
        self.gathers = self.streams.stream()
        self.post_optim_event: Any = None
        self.generation, self._writes = next_generation(), -1
        self._param_groups = [group for state in states for group in state.param_groups]
        self._group = states[0].data_mesh.whole
        self.order = ExecutionOrder(self._group, lambda number: self.states[number].title)
        is_exact = any(state.find_unused for state in states)
        self._unused = UnusedCheck(states[0].data_mesh, names_of(states), self.streams, is_exact, self.order.explain)
        self._scope = BackwardScope(self._group)
        self._inside: dict[int, list[FSDPState]] = {}  # by number, the states in a module
        self._last: FSDPState | None = None  # the last one visited; its parameters are in use
        self._depth, self._is_backward = 0, False
        self._ending: Callable[[], Any] = type(None)  # of the present backward: returns None after that broke off
        self._offloads = any(group.is_offloaded for group in self._param_groups)
        self._seen_training: dict[Hashable, int] = {}
        self.reducer = self._new_reducer()
        self._trains = self.reducer.trains = self._who_trains()
        self._watch = ParameterWatch(states)

    def _new_reducer(self) -> GradientReducer:
        return GradientReducer(self._param_groups, self.streams, self._unused, self.start_backward, self.order.explain)

    @classmethod
    def over(cls, entered: FSDPState) -> Runtime:
        """Make the runtime of the states in the module that is called."""
        refuse_transform(entered)
        states: list[FSDPState] = []
        for name, state in states_in(entered.module):
            state.index, state.name, state.is_kept = len(states), name, False
            states.append(state)
        for state in states:
            reset_sharded_params(state)
            state.compute_flags()
            if state.runtime is not None:
                state.runtime.is_current = False
        check_device(states)
        assign_buffers(states)
        streams = Streams(entered.device)
        for state in states:
            state.use(streams)
        runtime = cls(states)
        for state in states:
            state.runtime = runtime
        runtime._make_swaps()
        return runtime

    def is_running(self) -> bool:
        """Whether a forward or a backward of its modules is running."""
        return self._depth > 0 or _in_backward() >= 0

    def is_idle(self) -> bool:
        """Whether nothing but the states refers to their buffers: no graph waits for its backward."""
        return all(state.buffer.is_idle for state in self.states)

    def _states_in(self, number: int) -> list[FSDPState]:
        """Return the states in the modules of the state with this number, itself included."""
        if number not in self._inside:
            found = (state for module in self.states[number].modules for _, state in states_in(module))
            self._inside[number] = list(dict.fromkeys(found))
        return self._inside[number]

    # -- forward ------------------------------------------------------------------------------------------------------

    def pre_forward(self, state: FSDPState) -> None:
        """Gather `state` before its forward."""
        if not self._depth:
            if _in_backward() < 0:
                self._begin_forward(state)
            else:
                self.start_backward()
        if self.order.is_recording or not (state.stays_unsharded and state.sharded_state is UNSHARDED):
            self._unshard(state)
        self._depth += 1

    def _begin_forward(self, state: FSDPState) -> None:
        refuse_transform(state)
        if self._is_backward:
            self._drop_backward()
        self._unused.check(waits=not self.streams.is_cuda)
        if self.is_stale:
            self._assign_buffers_anew()
        if self.streams.is_cuda and self.streams.refresh():  # autograd runs a node in the stream it was made in
            for group in self._param_groups:
                group.make_views()
            self._make_swaps()
        if not self._watch.holds():
            self._reset_sharded_params()
        self._count_writes()
        self.has_grad = torch.is_grad_enabled()
        kind = "forward", state.index, self.has_grad, self._trains
        self._scope.enter(kind, state.index if self.has_grad else None)
        if self.post_optim_event is not None:
            if self.streams.is_cuda:
                self.post_optim_event.wait(self.streams.caller)
            self.post_optim_event = None
        self.order.begin(kind)
        for other in self.states:
            if not other.is_kept or not self._is_unwritten(other):
                other.sharded_state, other.is_kept = SHARDED, False
            elif other in self._states_in(state.index):
                other.is_kept = False

    def _is_unwritten(self, state: FSDPState) -> bool:
        return state.sharded_state is not SHARDED and all([group.is_unwritten for group in state.param_groups])

    def _reset_sharded_params(self) -> None:
        """Rebuild the state that depends on the modules' parameters, which were replaced or converted."""
        self.generation = next_generation()
        for state in self.states:
            reset_sharded_params(state)
        check_device(self.states)
        before, self._trains = self._trains, self._who_trains()
        if not self.reducer.fits():  # a complete conversion has reset the groups already, when it was made
            self.order.clear()
            for state in self.states:
                state.is_kept = False
            assign_buffers(self.states)
            buffers, self.reducer = self.reducer.buffers, self._new_reducer()
            self.reducer.resize(buffers)
        elif self._trains != before:
            for group in self._param_groups:
                group.make_views()
        self.reducer.trains = self._trains
        self._make_swaps()
        self._watch = ParameterWatch(self.states)

    def _make_swaps(self) -> None:
        for state in self.states:
            state.make_swaps()

    def _who_trains(self) -> int:
        """Return a number that identifies the set of parameters that require a gradient now."""
        trains = tuple(group.trains for group in self._param_groups)
        return self._seen_training.setdefault(trains, len(self._seen_training))

    def _count_writes(self) -> None:
        writes = sum(map(_version, self._param_groups))
        if writes != self._writes:
            self._writes, self.generation = writes, next_generation()

    def post_forward(self) -> None:
        """End the forward of a state; with the outermost one, end the pass."""
        self._depth -= 1
        if self._depth or _in_backward() >= 0:
            return
        is_recording = self.order.is_recording
        for number in self.order.end():
            self._gather(self.states[number])
        if is_recording:
            self.reducer.record(group for number in self.order.recorded for group in self.states[number].param_groups)
            self._scope.record(adds=self.order.has_left_order)
        if not torch.is_grad_enabled():
            self.gathers.join()
        if self._offloads:
            self.gathers.synchronize()  # later writes to shards on the CPU must not reach this pass

    def leaves(self, state: FSDPState, is_needed: bool) -> None:
        """Record that the forward of `state` ends, and whether a backward may need its parameters."""
        if self.order.is_recording and not self._is_backward:
            self._scope.leaves(state.index, is_needed)

    def abandon(self) -> None:
        """End a forward that raised."""
        self._depth -= 1

    def reset(self) -> None:
        """Drop the state of a broken forward or backward, and accumulated gradients."""
        self._depth, self._last = 0, None
        self._drop_backward()
        for state in self.states:
            self.reshard(state)
            state.finish()
            for group in state.param_groups:
                group.gradients.forget()
        self.gathers.join()

    # -- all-gathers --------------------------------------------------------------------------------------------------

    def _unshard(self, state: FSDPState) -> None:
        """Gather a state in its turn and wait for it; start to gather the next ones."""
        for number in self.order.visit(state.index, state.sharded_state is not SHARDED or not state.param_groups):
            self._gather(self.states[number])
        try:
            state.wait()
        except AbsentRankError:
            self.order.explain(state.index)
            raise
        self._last = state
        left, needed_first = state.ahead[self._is_backward], set[FSDPState]()
        for number in self.order.upcoming():
            following = self.states[number]
            if following.has_own_buffer and following.sharded_state is not SHARDED:
                continue
            if not self._is_free(following) or following.buffer.holder in needed_first:
                return
            self._gather(following)
            needed_first.add(following)
            left -= 1
            if not left:
                return

    def _gather(self, state: FSDPState) -> None:
        if state.sharded_state is SHARDED:
            holder = state.buffer.holder
            if holder is not None:
                holder.make_room_for(state)
            if self._is_backward:
                for group in state.param_groups:
                    group.check_unwritten()
            state.gather(self.gathers, self._is_backward)
        if self._is_backward:
            self.reducer.skip(state.param_groups)

    def _is_free(self, state: FSDPState) -> bool:
        holder = state.buffer.holder
        return holder is None or holder is state or not (holder.is_running or holder is self._last)

    def unshard(self, state: FSDPState) -> None:
        """Start to gather `state` now, so that its next forward need not."""
        is_between = not self.is_running()
        if not state.has_own_buffer:
            state.is_user_unsharded = self.is_stale = True
        if is_between:
            if self._is_backward:
                self._drop_backward()
            if self.is_stale:
                self._assign_buffers_anew()
            self._count_writes()
            if not state.is_kept:
                state.sharded_state = SHARDED
        holder = state.buffer.holder
        is_taken = holder is not None and holder.is_kept and not state.has_own_buffer
        if state.sharded_state is SHARDED and not is_taken and self._is_free(state):
            self._gather(state)
            state.is_kept = is_between

    def reshard(self, state: FSDPState) -> None:
        """Mark `state` as sharded, so that its next use gathers it again."""
        state.is_kept = False
        if not state.is_running:
            state.sharded_state = SHARDED

    def _assign_buffers_anew(self) -> None:
        """Assign buffers by the present options, unless a graph on some rank still needs values in a buffer."""
        if not all(map(any, self._group.exchange(bytes([self.is_idle()])))):
            return  # the next forward tries again
        self.is_stale = False
        self.order.clear()
        kept: list[tuple[FSDPState, Any]] = []
        for state in self.states:
            if state.is_kept and state.sharded_state is not SHARDED:
                state.wait()
                kept.append((state, [group.unsharded for group in state.param_groups]))
            state.compute_flags()
        assign_buffers(self.states)
        self.reducer.resize(max([REDUCE_BUFFERS, *(state.reductions_ahead for state in self.states)]))
        self._make_swaps()
        for state in self.states:
            state.sharded_state = SHARDED
        for state, unsharded in kept:
            state.move_from(unsharded)

    # -- backward -----------------------------------------------------------------------------------------------------

    def pre_backward(self, state: FSDPState, generation: int) -> None:
        """Gather `state` before its backward, of a forward with this generation of values."""
        if generation != self.generation:
            raise written_too_early(info for group in state.param_groups for info in group.params_info)
        self.start_backward()
        if not (state.skips_backward or (state.stays_unsharded and state.sharded_state is UNSHARDED)):
            self._unshard(state)

    @untraced(UNCOMPILED)
    def start_backward(self, grad: torch.Tensor | None = None) -> None:
        """Start the backward state if it has not started. Usable as a tensor hook."""
        if self._is_backward and self._ending() is None:
            self._drop_backward()
        if not self._is_backward:
            self._begin_backward()

    def _begin_backward(self) -> None:
        def end() -> None:  # lives as long as autograd's task
            self._end_backward()

        # If a backward breaks off, modules show their sharded parameters as soon as autograd's task is gone.
        self._is_backward, self._ending = True, weakref.ref(end, self._show_sharded)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._scope.begin()
        self.order.begin(("backward", self._scope.called, self._trains), self._gathered_again)
        self.reducer.begin(self._scope.called, self._groups_in_scope)
        for state in self.states:
            if state.stays_unsharded:  # only a second backward of the same forward gathers it
                is_freed = state.sharded_state is SHARDED and state.param_groups
                if is_freed and self._is_in_scope(state) and all([group.is_unwritten for group in state.param_groups]):
                    self._gather(state)
                self.reducer.skip(state.param_groups)

    def _gathered_again(self) -> list[int]:
        states = [self.states[number] for number in self._scope.left]
        return [state.index for state in states if not (state.stays_unsharded or state.skips_backward)]

    def _groups_in_scope(self) -> list[ParamGroup]:
        return [group for state in self.states if self._is_in_scope(state) for group in state.param_groups]

    def _is_in_scope(self, state: FSDPState) -> bool:
        return any(state in self._states_in(number) for number in self._scope.called)

    def _show_sharded(self, _: Any = None) -> None:
        for state in self.states:
            if state.is_in_backward:
                state.end_backward()

    def _drop_backward(self) -> None:
        """Drop the state of a backward that an error ended."""
        self._is_backward = False
        self._show_sharded()
        self.reducer.drop()

    @untraced(UNCOMPILED)
    def _end_backward(self) -> None:
        self._show_sharded()
        try:
            for number in self.order.end():
                self._gather(self.states[number])
            self._is_backward = False
            self.reducer.end()
        except BaseException:
            self._is_backward = True  # broken off, for example by a hook: the next forward drops it
            raise
        self.gathers.join()
        for state in self.states:
            state.is_kept = state.sharded_state is not SHARDED and (state.keeps_after_backward or state.is_kept)
            if not state.is_kept:
                state.sharded_state = SHARDED


FSDPState.new_runtime = Runtime.over
