"""The gradient reducer: reduces the gradients of a model over the ranks, in one order, while backward runs.

Autograd can report which nodes of unsharded parameters a backward will run, except those used inside a reentrant
checkpoint: it recomputes their forward in the middle of the backward, and runs a backward of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import attrs
import torch

from shardtensor.comm.group import Pending
from shardtensor.comm.streams import Streams
from shardtensor.errors import AbsentRankError
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.unused import UnusedCheck
from shardtensor.layout.ranges import REDUCE_BUFFERS
from shardtensor.tensor.bucket import GradientBuffer, Grads, allocate, free

_will_run = torch._C._will_engine_execute_node
_in_backward = torch._C._current_graph_task_id


@attrs.define(eq=False)
class _PendingReduce:
    """A pending reduction of a group, which of its parameters have a gradient, and on cuda the result."""

    group: ParamGroup
    used: list[bool]
    input_buffer: GradientBuffer
    pending: Pending | None = None
    grad: torch.Tensor | None = None


class GradientReducer:
    """Reduces the gradients of groups in the reverse of the order in which forwards first used them.

    Args:
        param_groups: of the model; this sets their positions.
        start_backward: starts the backward state if it has not started.
        explain: raises if ranks called different units; takes the number of a state.
    """

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        streams: Streams,
        unused: UnusedCheck,
        start_backward: Callable[[], None],
        explain: Callable[[int], None],
    ) -> None:
        self.param_groups, self._streams, self.unused = list(param_groups), streams, unused
        self._start_backward, self._explain = start_backward, explain
        self._stream = streams.stream()
        self.trains: Hashable = None  # which parameters require a gradient now
        self._used_first: dict[Hashable, list[int]] = {}  # by `trains`: positions, in the order of forwards
        self._orders: dict[Hashable, dict[ParamGroup, int]] = {}  # by `trains` and the backward's scope
        self._places: dict[ParamGroup, int] = {}  # of the present backward: the groups in order, numbered
        self._expected: list[ParamGroup] = []
        self._next, self._task = 0, -1  # the group that is sent next; autograd's number of the backward
        self._recomputed: set[int] = set()  # a backward inside the present one may compute gradients of these
        self._missing: set[int] = set()  # this rank has no gradients of these
        self._passed: set[int] = set()  # the execution order has reached these
        self._reduced_grads: dict[int, torch.Tensor] | None = None  # only if ranks exchange which parameters they used
        self._is_accumulating = any(group.gradients.are_waiting for group in param_groups)
        self._dtypes = self._present_dtypes()
        for position, group in enumerate(param_groups):
            group.gradients.position, group.on_gradients = position, self.arrived
        self.resize(REDUCE_BUFFERS)

    def resize(self, buffers: int) -> None:
        """Set how many reductions may be pending at a time, and drop all input buffers. Call it between backwards."""
        self.buffers = buffers
        self._pending: list[_PendingReduce | None] = [None] * buffers
        self._events = [self._streams.event() for _ in range(buffers)]
        self._memory: dict[int, torch.Tensor] = {}
        self._input_buffers: dict[tuple[int, int], GradientBuffer] = {}
        self._turn = 0
        self._memory_size = max((group.gradients.input_bytes for group in self.param_groups), default=0)

    def fits(self) -> bool:
        """Whether the groups still compute and reduce in the dtypes for which this was made."""
        return self._dtypes == self._present_dtypes()

    def _present_dtypes(self) -> list[tuple[torch.dtype, torch.dtype]]:
        return [(group.compute_dtype, group.gradients.reduce_dtype) for group in self.param_groups]

    # -- the order --------------------------------------------------------------------------------------------------

    def mark_recompute(self, param_groups: Iterable[ParamGroup]) -> None:
        """Record that a forward uses these groups without autograd, as inside a reentrant checkpoint."""
        self._recomputed.update([group.gradients.position for group in param_groups])

    def record(self, param_groups: Iterable[ParamGroup]) -> None:
        """Record the order in which a forward used groups, the same on all ranks; groups it did not use come last."""
        earlier = self._used_first.get(self.trains, [])
        self._used_first[self.trains] = list(dict.fromkeys([*earlier, *(g.gradients.position for g in param_groups)]))
        self._orders.clear()

    def _order(self, param_groups: Iterable[ParamGroup]) -> list[ParamGroup]:
        used_first = self._used_first.get(self.trains, [])
        inside = {group.gradients.position for group in param_groups if any(group.trains)}
        order = dict.fromkeys([*used_first, *range(len(self.param_groups))])
        return [self.param_groups[position] for position in reversed(order) if position in inside]

    def begin(self, scope: Hashable, reachable: Callable[[], Iterable[ParamGroup]]) -> None:
        """Begin a backward.

        Args:
            scope: identifies backwards that reach the same groups.
            reachable: returns the groups that this backward may reach; all ranks reduce those of them that train.
        """
        self.unused.check(waits=True)
        self._next, self._task = 0, _in_backward()
        key = self.trains, scope
        if key not in self._orders:
            self._orders[key] = {group: place for place, group in enumerate(self._order(reachable()))}
        self._places = self._orders[key]
        self._expected = expected = list(self._places)
        self._missing, self._passed = set(), set()
        runs = [_will_run(group.node) for group in expected]  # 60 ns each
        if not all(runs):
            absent = {group.gradients.position for group, will_run in zip(expected, runs, strict=True) if not will_run}
            self._missing = absent - self._recomputed
        is_exchanged = self.unused.is_exchanging and any([group.gradients.requires_sync for group in expected])
        self._reduced_grads = {} if is_exchanged else None

    def skip(self, param_groups: Iterable[ParamGroup]) -> None:
        """Reduce zeros for those of these groups of which this rank has no gradients, when it is their turn.

        Other ranks may wait for these reductions while this rank waits for those ranks.
        """
        if self._missing:
            self._passed.update([group.gradients.position for group in param_groups])
            self._send_ready()

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, group: ParamGroup, grads: Grads) -> None:
        """Hold the gradients of a group's unsharded parameters, and start the reductions whose turn it is.

        The backward of a reentrant checkpoint, inside the present one, may compute a part of them; the rest follow.
        """
        self._start_backward()
        gradients, place = group.gradients, self._places.get(group, -1)
        if all([grad is None for grad in grads]):
            is_inside = _in_backward() != self._task or gradients.position in self._recomputed
            if place >= self._next and not is_inside and gradients.requires_sync:
                gradients.hold(grads)
        else:
            gradients.hold(grads)
            if not gradients.requires_sync:
                self._is_accumulating = True
            elif place < self._next:  # more gradients of a group that was sent, from a checkpoint's backward
                self._send(group)
        self._send_ready()

    def _send_ready(self) -> None:
        while self._next < len(self._expected):
            group = self._expected[self._next]
            gradients = group.gradients
            is_absent = gradients.position in self._missing and gradients.position in self._passed
            if gradients.held is None and gradients.requires_sync and not is_absent:
                return
            self._next += 1
            self._send(group)

    def _send(self, group: ParamGroup) -> None:
        """Start to reduce the gradients that a group holds."""
        gradients = group.gradients
        if not gradients.requires_sync:  # the same on all ranks
            return
        turn = self._turn
        self._finish_reduction(turn)
        self._turn = (turn + 1) % self.buffers
        buffer = self._input_buffer(group, turn)
        used = gradients.pack(buffer)
        self.unused.pattern.append((gradients.position, used))
        pending = self._pending[turn] = _PendingReduce(group, used, buffer)
        if not self._streams.is_cuda:
            pending.pending = gradients.reduce(buffer)
            return
        self._stream.follow()
        with self._stream:
            gradients.reduce(buffer).wait()
            pending.grad = gradients.receive(buffer.summed, used)
            self._stream.mark(self._events[turn])

    def _finish_reduction(self, turn: int) -> None:
        """Wait for a pending reduction, and set its result as gradients of the parameters."""
        reduced, self._pending[turn] = self._pending[turn], None
        if reduced is None:
            return
        group, gradients, grad = reduced.group, reduced.group.gradients, reduced.grad
        if reduced.pending is not None:
            try:
                reduced.pending.wait()
            except AbsentRankError:
                self._explain(group.state().index)
                raise
            grad = gradients.receive(reduced.input_buffer.summed, reduced.used)
        else:
            self._streams.wait(self._events[turn])
            if group.is_offloaded:
                self._events[turn].synchronize()  # hooks and the optimizer read gradients on the CPU
        if grad is None:
            self._is_accumulating = True
            return
        gradients.attach(grad, reduced.used)
        if self._reduced_grads is not None:
            before = self._reduced_grads.get(gradients.position, grad)
            self._reduced_grads[gradients.position] = grad if before is grad else before + grad
        if gradients.flat_shard.has_hooks:
            self._run_hooks(group, reduced.used)

    def _run_hooks(self, group: ParamGroup, used: list[bool]) -> None:
        group.show_sharded()  # the module's backward no longer needs the unsharded ones
        group.gradients.run_hooks(used)

    def _finish_reductions(self) -> None:
        for _ in self._pending:
            self._finish_reduction(self._turn)
            self._turn = (self._turn + 1) % self.buffers

    def end(self) -> None:
        """End a backward: reduce the remaining groups, zeros for those without gradients, and wait for all."""
        while self._next < len(self._expected):
            self._next += 1
            self._send(self._expected[self._next - 1])
        self._finish_reductions()
        if self._is_accumulating:  # parameters that an earlier backward used and this one did not
            for group in self.param_groups:
                if group.gradients.are_due:
                    self._send(group)
            self._finish_reductions()
            self._is_accumulating = any(group.gradients.are_waiting for group in self.param_groups)
        if self._reduced_grads is not None:
            self._attach_missed(self._reduced_grads)
        self._recomputed.clear()
        self._stream.join()
        if self.unused.pattern:  # otherwise no rank has reduced anything
            with self._stream:
                self.unused.end()
        for memory in self._memory.values():
            free(memory)

    def _attach_missed(self, reduced_grads: dict[int, torch.Tensor]) -> None:
        """Set the gradients of parameters that only other ranks used."""
        for position, missed in self.unused.exchange().items():
            if position in reduced_grads:
                group = self.param_groups[position]
                group.gradients.attach(reduced_grads[position], missed)
                self._run_hooks(group, missed)
        self._reduced_grads = None

    def drop(self) -> None:
        """Drop the state of a backward that broke off; gradients accumulated by earlier backwards stay."""
        for group in self.param_groups:
            group.gradients.held = None
        self.unused.pattern = []
        self._recomputed.clear()
        for reduced in self._pending:
            if reduced is not None and reduced.pending is not None:
                reduced.pending.wait()  # otherwise it would write to buffers of the next backward
        self._stream.join()
        self._pending = [None] * self.buffers

    def _input_buffer(self, group: ParamGroup, turn: int) -> GradientBuffer:
        memory = self._memory.get(turn)
        if memory is None:
            memory = self._memory[turn] = torch.empty(self._memory_size, dtype=torch.uint8, device=self._streams.device)
        allocate(memory)
        key = turn, group.gradients.position
        if key not in self._input_buffers:
            self._input_buffers[key] = group.gradients.input_buffer(memory)
        return self._input_buffers[key]
