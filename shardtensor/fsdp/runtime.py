"""`Runtime`: one for each model; it gathers units around forward and backward, and starts reductions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from shardtensor.comm.untraced import untraced
from shardtensor.fsdp.autograd import next_generation, written_too_early
from shardtensor.fsdp.buffers import assign_buffers
from shardtensor.fsdp.checks import ParameterWatch, check_place, refuse_transform, take_in
from shardtensor.fsdp.order import BackwardRoot, ExecutionOrder
from shardtensor.fsdp.outside import UNCOMPILED
from shardtensor.fsdp.reducer import BUFFERS, GradientReducer
from shardtensor.fsdp.state import SHARDED, FSDPState, states_in
from shardtensor.fsdp.streams import Streams
from shardtensor.fsdp.unshard import Unsharding
from shardtensor.fsdp.unused import UnusedCheck, names_of

_nothing: Callable[[], Any] = type(None)
_in_backward = torch._C._current_graph_task_id


class Runtime(Unsharding):
    """Made in the first call of a module that no other running module holds; shared by all units in that module."""

    def __init__(self, states: list[FSDPState]) -> None:
        self.states = states
        self.device = states[0].device
        self.is_current = True
        self.streams, self.gathers = states[0].streams, states[0].streams.stream()
        self._param_groups = [group for state in states for group in state.param_groups]
        self._group = states[0].data_mesh.whole
        self.order = ExecutionOrder(self._group, lambda number: self.states[number].title)
        is_exact = any(state.find_unused for state in states)
        self._unused = UnusedCheck(states[0].data_mesh, names_of(states), self.streams, is_exact, self.order.explain)
        self.reducer = self._new_reducer()
        self._leaving: list[int] = []  # units in the order in which their forward ended in this pass, ...
        self._needs: list[bool] = []  # ... and whether their backward may need parameters
        self._left: dict[Hashable, list[int]] = {}  # by kind of forward, those whose backward does on any rank
        self._kind: Hashable = None
        self._root = BackwardRoot(states)
        self._last: FSDPState | None = None  # visited; its parameters are in use
        self._kept_groups = self._find_kept_groups()
        self._depth, self._is_backward, self.has_grad, self._has_kept = 0, False, False, False
        self.generation = next_generation()  # of parameters' values; another where a gather finds others than the last
        self._writes = -1
        self._watch = ParameterWatch(states)
        self._seen_training: dict[Hashable, int] = {}
        self._trains = self._who_train()
        self.reducer.set_order(self._trains)
        self._ending: Callable[[], Any] = _nothing  # of the backward that runs: gives None when that broke off
        self.keeps_some = any(state.keeps_after_backward for state in states)
        self._offloads = any(group.is_offloaded for state in states for group in state.param_groups)
        self._runs_far = any(ahead != 1 for state in states for ahead in state.ahead)
        self.is_stale = False
        self.post_optim_event: Any = None

    @classmethod
    def over(cls, entered: FSDPState) -> Runtime:
        """The runtime of the states in the module that is called."""
        refuse_transform(entered)
        states: list[FSDPState] = []
        for name, state in states_in(entered.module):
            state.index, state.name, state.is_kept = len(states), name, False
            states.append(state)
        for state in states:
            take_in(state)
            state.settle()
            if state.runtime is not None:
                state.runtime.is_current = False
        check_place(states)
        assign_buffers(states)
        streams = Streams(entered.device)
        for state in states:
            state.use(streams)
        runtime = cls(states)
        for state in states:
            state.runtime = runtime
            state.make_swaps()
        return runtime

    # -- forward ----------------------------------------------------------------------------------------------------

    def enter(self, state: FSDPState) -> None:
        """Gather `state` before its forward."""
        if not self._depth:
            if _in_backward() < 0:
                self._begin(state)
            else:
                self.start_backward()
        if not state.is_at_hand or self.order.is_recording:
            self._unshard_for(state)
        self._depth += 1

    def _begin(self, state: FSDPState) -> None:
        refuse_transform(state)
        if self._is_backward:
            self._break_off()
        self._unused.check(waits=not self.streams.is_cuda)
        if self.is_stale:
            self._assign_buffers_anew()
        if self.streams.refresh():  # autograd remembers the stream that a node was made in
            self._make_views()
            for other in self.states:
                other.make_swaps()
        if not self._watch.holds():
            self._mend()
        self._count_writes()
        self.has_grad = has_grad = torch.is_grad_enabled()
        if has_grad:
            self._root.enter(state)
        if self.post_optim_event is not None:
            self._wait_for_optimizer()
        self._kind = ("forward", state.index, has_grad, self._trains)
        self.order.begin(self._kind)
        self._leaving, self._needs = [], []
        kept = self._still_gathered({inner for _, inner in states_in(state.module)}) if self._has_kept else ()
        for other in self.states:
            if other not in kept:
                other.sharded_state = SHARDED

    def _wait_for_optimizer(self) -> None:
        """Make the gathers of this forward wait for the event that the user gave."""
        if self.device.type == "cuda":
            self.post_optim_event.wait(self.streams.caller)
        self.post_optim_event = None

    def reset(self) -> None:
        """Forget all that a broken forward or backward left, and gradients that wait."""
        self._depth, self._last = 0, None
        self._break_off()
        for state in self.states:
            self.reshard(state)
            state.finish()
            for group in state.param_groups:
                group.accumulated.drop()
        self.gathers.join()

    def _mend(self) -> None:
        """Reset what depends on the modules' parameters, which were replaced or converted since the last forward."""
        self.generation = next_generation()
        for state in self.states:
            take_in(state)
        check_place(self.states)
        if not self.reducer.fits():  # complete conversions were taken in already, when they were made
            self.order.clear()
            self._keep_only(())
            assign_buffers(self.states)
            self.reducer = self._new_reducer(self.reducer.buffers)
            self.reducer.set_order(self._trains)
        trains = self._who_train()
        if trains != self._trains:
            self._trains = trains
            self.reducer.set_order(trains)
            self._make_views()
        for state in self.states:
            state.make_swaps()
        self._watch = ParameterWatch(self.states)

    def _new_reducer(self, buffers: int = BUFFERS) -> GradientReducer:
        explain = self.order.explain
        return GradientReducer(self._param_groups, self.streams, self._unused, self.start_backward, explain, buffers)

    def _make_views(self) -> None:
        for group in {id(group.coalesced or group): group for group in self._param_groups}.values():
            group.make_views()

    def _who_train(self) -> int:
        """A number for which parameters require a gradient now."""
        return self._seen_training.setdefault(
            tuple(group.trains for group in self._param_groups), len(self._seen_training)
        )

    def is_running(self) -> bool:
        """Whether a forward or a backward of its modules is going on."""
        return self._depth > 0 or _in_backward() >= 0

    def leave(self, state: FSDPState) -> None:
        """End the forward of `state`, and the pass with the outermost one."""
        self._depth -= 1
        if self._depth or _in_backward() >= 0:
            return
        is_recording = self.order.is_recording
        for number in self.order.end(len(self._leaving)):
            self._gather(number)
        if is_recording:
            self._record()
        if self.has_grad:
            self._root.leave(self._kind, self._left[self._kind])
        if not torch.is_grad_enabled():
            self.gathers.join()
        if self._offloads:
            self.gathers.synchronize()  # what is written to shards on the CPU from now on is for the next pass

    def _record(self) -> None:
        """Take over what a forward recorded."""
        self.reducer.record(group for number in self.order.recorded for group in self.states[number].param_groups)
        blobs = self._group.exchange(bytes([1, *self._needs]))  # an output may require a gradient on some ranks only
        needed = [any(needs) for needs in zip(*blobs, strict=True)][1:]
        left = [number for number, is_needed in zip(self._leaving, needed, strict=True) if is_needed]
        before = self._left[self._kind] if self.order.has_left_order else []
        self._left[self._kind] = list(dict.fromkeys([*before, *left])) if before else left

    def abandon(self, state: FSDPState) -> None:
        """End a forward that raised."""
        self._depth -= 1

    def mark_recompute(self, state: FSDPState) -> None:
        """Record that a unit ran where autograd records nothing, as in a reentrant checkpoint."""
        self.reducer.mark_recompute(state.param_groups)
        if self.order.is_recording:
            self.leaves(state, True)

    def leaves(self, state: FSDPState, needs: bool) -> None:
        """Record that a unit's forward ends, and whether backward may need its parameters."""
        if not self._is_backward:
            self._leaving.append(state.index)
            self._needs.append(needs)

    # -- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, state: FSDPState, generation: int) -> None:
        """Gather `state` before its backward, of a forward with this generation of values."""
        if generation != self.generation:
            raise written_too_early(info for group in state.param_groups for info in group.params_info)
        self.start_backward()
        if not (state.is_at_hand or state.skips_backward):
            self._unshard_for(state)

    @untraced(UNCOMPILED)
    def start_backward(self, grad: torch.Tensor | None = None) -> None:
        """Start backward state if it has not started. Usable as a tensor hook."""
        if self._is_backward and self._ending() is None:
            self._break_off()
        if not self._is_backward:
            self._begin_backward()

    def _begin_backward(self) -> None:
        def end() -> None:  # lives as long as autograd's task
            self._end_backward()

        self._is_backward, self._ending = True, weakref.ref(end, self._ended)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._root.begin()
        self.order.begin(("backward", self._root.entered, self._trains), self._root.gathered_again)
        self.reducer.begin(self._root.entered, self._root.param_groups)
        lost = [state for state in self.states if state.stays_gathered and state.sharded_state is SHARDED]
        gone = [state for state in lost if state.param_groups]
        if gone:
            self._gather_what_stays(gone)
        self.reducer.skip(self._kept_groups)

    def _ended(self, _: Any) -> None:
        """Show sharded parameters when autograd's task is gone that broke off."""
        if self._is_backward:
            self._show_sharded()

    def _show_sharded(self) -> None:
        for state in self.states:
            if state.is_in_backward:
                state.end_backward()

    def _break_off(self) -> None:
        """Drop a backward that an error ended."""
        self._is_backward = False
        self._show_sharded()
        self.reducer.drop()

    @untraced(UNCOMPILED)
    def _end_backward(self) -> None:
        self._show_sharded()
        try:
            for number in self.order.end():
                self._gather(number)
            self._is_backward = False
            self.reducer.end()
        except BaseException:
            self._is_backward = True  # broken off, by a hook perhaps: the next forward drops what is left
            raise
        self.gathers.join()
        if self.keeps_some or self._has_kept:
            self._keep_only(
                [state for state in self.states if state.is_gathered and (state.keeps_after_backward or state.is_kept)]
            )
        for state in self.states:
            if not state.is_kept:
                state.sharded_state = SHARDED


FSDPState.new_runtime = Runtime.over
