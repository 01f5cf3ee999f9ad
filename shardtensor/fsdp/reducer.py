"""The gradients of a model, summed over the ranks in one order while backward goes on.

Autograd says which nodes of gathered parameters a backward will run. What was computed inside of a reentrant checkpoint
it cannot say: that is computed again in the middle of the backward, which then runs one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Pending
from shardtensor.errors import AbsentRankError
from shardtensor.fsdp.bucket import GradientBucket, InputBuffer, buckets_of
from shardtensor.fsdp.gradients import Grads
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.streams import Streams
from shardtensor.fsdp.unused import UnusedCheck

_will_run = torch._C._will_engine_execute_node


class ExpectedGradients:
    """Which groups get gradients in a backward of this rank, by number.

    Attributes:
        hidden: those whose gradients a backward inside of this one may make.
        missing: those that this rank has no gradients of.
    """

    def __init__(self) -> None:
        self.hidden: set[int] = set()
        self.missing: set[int] = set()
        self._passed: set[int] = set()

    def mark_recompute(self, numbers: Iterable[int]) -> None:
        """Record that these compute where autograd records nothing: a backward of their own may make gradients."""
        self.hidden.update(numbers)

    def begin(self, numbers: Collection[int], nodes: Iterable[Any]) -> None:
        """A backward begins.

        Args:
            numbers: of the groups whose gradients are expected.
            nodes: the autograd nodes of the same, in the same order.
        """
        self.missing, self._passed = set(), set()
        comes = list(map(_will_run, nodes))  # 60 ns each
        if not all(comes):
            found = zip(numbers, comes, strict=True)
            self.missing = {number for number, is_coming in found if not is_coming} - self.hidden

    def end(self) -> None:
        """The backward has ended, or broke off."""
        self.hidden.clear()

    def is_without(self, number: int) -> bool:
        """Whether this rank has no gradients of it, and the order has come to it."""
        return number in self.missing and number in self._passed

    def skip(self, numbers: Iterable[int]) -> None:
        """Record that the order has come to these."""
        self._passed.update(numbers)


_in_backward = torch._C._current_graph_task_id

BUFFERS = 2
"""Pending reductions at a time, where the user sets nothing else."""
_KEPT = 1 << 24  # bytes; what is larger is given back after each backward, for a loss needs the most memory just before


@attrs.define(eq=False)
class _PendingReduce:
    """A pending reduction: of what, which parameters of each group have a gradient, where, what to wait for."""

    bucket: GradientBucket
    used: list[list[bool]]
    input_buffer: InputBuffer
    pending: Pending | None = None
    grads: list[torch.Tensor | None] | None = None


class GradientReducer:
    """Sends the gradients of groups in the reverse of the order in which the forward first used them."""

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        streams: Streams,
        used: UnusedCheck,
        start_backward: Callable[[], None],
        explain: Callable[[int], None],
        buffers: int = BUFFERS,
    ) -> None:
        self.param_groups, self._streams, self.unused = list(param_groups), streams, used
        self._start_backward = start_backward  # begins a backward that has not begun
        self._explain = explain  # raises where ranks went different ways; takes the number of a unit
        self.stream = streams.stream()
        self._met: list[int] = []
        self._order: list[int] = []
        self._expectations: dict[Hashable, _BucketOrder] = {}
        self._order_key: Hashable = None
        self._known: dict[Hashable, tuple[list[int], list[int], dict[Hashable, _BucketOrder]]] = {}
        self._expected: list[GradientBucket] = []
        self._places: dict[int, int] = {}  # in `_expected`, by number of the group
        self._expected_gradients = ExpectedGradients()
        self._landed: dict[int, torch.Tensor] | None = None
        self._next, self._task = 0, -1  # the bucket that is sent next; autograd's number of the backward
        # Whether some gradients may wait for a later backward.
        self._is_carrying = any(group.accumulated.is_waiting for group in param_groups)
        self._dtypes = _dtypes_of(param_groups)
        for position, group in enumerate(param_groups):
            group.position, group.on_gradients = position, self.arrived
        self.resize(buffers)

    def resize(self, buffers: int) -> None:
        """Set how many reductions may be pending at a time, and lay out buckets anew; between two backwards."""
        self.buffers = buffers
        self._pending: list[_PendingReduce | None] = [None] * buffers
        self._events = [self._streams.event() for _ in range(buffers)]
        self._memory: dict[int, torch.Tensor] = {}
        self._input_buffers: dict[tuple[int, tuple[int, ...]], InputBuffer] = {}
        self._turn = 0
        self._expectations = {}
        self._known = {key: (met, order, {}) for key, (met, order, _) in self._known.items()}
        self._alone = [GradientBucket([group]) for group in self.param_groups]
        buckets = [*self._alone, *buckets_of(self.param_groups)]
        self._memory_size = max((bucket.size_bytes + bucket.apart_bytes for bucket in buckets), default=0)

    def fits(self) -> bool:
        """Whether the groups still compute and reduce in the dtypes that this was made for."""
        return self._dtypes == _dtypes_of(self.param_groups)

    def set_order(self, trains: Hashable) -> None:
        """Switch to the bucket order recorded for this set of trainable parameters."""
        self._known[self._order_key] = (self._met, self._order, self._expectations)
        self._order_key = trains
        self._met, self._order, self._expectations = self._known.get(trains, ([], [], {}))

    # -- the order --------------------------------------------------------------------------------------------------

    def mark_recompute(self, param_groups: Iterable[ParamGroup]) -> None:
        """Record that a forward computes with these where autograd records nothing, as in a reentrant checkpoint."""
        self._expected_gradients.mark_recompute(self.numbers(param_groups))

    def numbers(self, param_groups: Iterable[ParamGroup]) -> list[int]:
        """The numbers of some groups."""
        return [group.position for group in param_groups]

    def record(self, param_groups: Iterable[ParamGroup]) -> None:
        """Take the order in which a forward used groups, the same on all ranks; those it did not use come last."""
        self._met = list(dict.fromkeys([*self._met, *self.numbers(param_groups)]))
        self._order = list(dict.fromkeys([*self._met, *range(len(self.param_groups))]))[::-1]
        self._expectations = {}

    def begin(self, scope: Hashable, among: Callable[[], Sequence[ParamGroup]]) -> None:
        """At the start of a backward: know what comes, and what this rank has no gradients of.

        Args:
            scope: what tells backwards from others.
            among: the groups that it may reach; those of them that train are reduced, on all ranks.
        """
        self.unused.check(waits=True)
        self._next, self._task = 0, _in_backward()
        if scope not in self._expectations:
            inside = set(self.numbers(among()))
            param_groups = [
                self.param_groups[i] for i in self._order if i in inside and any(self.param_groups[i].trains)
            ]
            self._expectations[scope] = _BucketOrder.of(param_groups)
        expected = self._expectations[scope]
        self._expected, self._places = expected.buckets, expected.places
        self._expected_gradients.begin(expected.places, expected.nodes())
        is_settled = self.unused.asks and any(
            [group.syncs for bucket in self._expected for group in bucket.param_groups]
        )
        self._landed = {} if is_settled else None

    def skip(self, param_groups: Sequence[ParamGroup]) -> None:
        """Send zeros for those of these groups that this rank has no gradients of, if it is their turn.

        Other ranks that wait for them may be what this one waits for.
        """
        if self._expected_gradients.missing:
            self._expected_gradients.skip(self.numbers(param_groups))
            self._send_those_there()

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, param_groups: Sequence[ParamGroup], grads: Sequence[Grads]) -> None:
        """Take the gradients of whole parameters of groups that are coalesced, and send what is next and there.

        A backward inside of this one, of a reentrant checkpoint, brings those of some of them, and others come later.
        """
        self._start_backward()
        is_inside = _in_backward() != self._task
        for group, own in zip(param_groups, grads, strict=True):
            place = self._places.get(group.position, -1)
            if all([grad is None for grad in own]):
                is_unused = (
                    place >= self._next and not is_inside and group.position not in self._expected_gradients.hidden
                )
                if is_unused and group.syncs:
                    group.hold(own)
                continue
            group.hold(own)
            if not group.syncs:
                self._is_carrying = True
                continue
            if place < self._next:  # more of what was sent, from a checkpoint's own backward
                self._send(self._alone[group.position])
        self._send_those_there()

    def _send_those_there(self) -> None:
        while self._next < len(self._expected):
            bucket = self._expected[self._next]
            if not bucket.are_there(self._expected_gradients.is_without):
                return
            self._next += 1
            self._send(bucket)

    def end(self) -> None:
        """At the end of a backward: send what is left, zeros where nothing came, and wait for all."""
        for bucket in self._expected[self._next :]:
            self._send(bucket)
        self._next = len(self._expected)
        self._land_all()
        if self._is_carrying:
            self._send_carried()
        if self._landed is not None:
            self._settle(self._landed)
        self._expected_gradients.end()
        self.stream.join()
        if self.unused.pattern:  # else nothing was reduced, on any rank
            with self.stream:
                self.unused.end()
        if self._memory_size > _KEPT:
            for memory in self._memory.values():
                memory.untyped_storage().resize_(0)  # what lies in it finds it again: a fifth of a millisecond each

    def _settle(self, landed: dict[int, torch.Tensor]) -> None:
        """Take what other ranks brought for parameters that only they used."""
        for number, missed in self.unused.settle().items():
            group = self.param_groups[number]
            if number in landed:
                group.attach(landed[number], missed)
                self._run_hooks(group, missed)
        self._landed = None

    def _send_carried(self) -> None:
        """Send what waits from earlier backwards for parameters that this one did not use."""
        for group in self.param_groups:
            if group.syncs and group.accumulated.is_due:
                self._send(self._alone[group.position])
        self._land_all()
        self._is_carrying = any(group.accumulated.is_waiting for group in self.param_groups)

    def _land_all(self) -> None:
        for _ in self._pending:
            self._land(self._turn)
            self._turn = (self._turn + 1) % self.buffers

    def drop(self) -> None:
        """Forget what a broken backward left; what earlier ones left to wait stays."""
        for group in self.param_groups:
            group.held = None
        self.unused.drop()
        self._expected_gradients.end()
        for pending in self._pending:
            if pending is not None and pending.pending is not None:
                pending.pending.wait()  # or it would write into memory of the next
        self.stream.join()
        self._pending = [None] * self.buffers

    def _send(self, bucket: GradientBucket) -> None:
        """Send what is held of a bucket."""
        if not all([group.syncs for group in bucket.param_groups]):  # the same on all ranks
            for group in bucket.param_groups if len(bucket.param_groups) > 1 else ():
                self._send(self._alone[group.position])
            return
        turn = self._turn
        self._land(turn)
        self._turn = (turn + 1) % self.buffers
        input_buffer = self._input_buffer(bucket, turn)
        used = bucket.pack(input_buffer)
        self.unused.pattern += zip(bucket.numbers, used, strict=True)
        if not self._streams.is_cuda:
            self._pending[turn] = _PendingReduce(bucket, used, input_buffer, bucket.reduce(input_buffer))
            return
        self.stream.follow()
        with self.stream:
            bucket.reduce(input_buffer).wait()
            grads = bucket.receive(input_buffer, used)
            self.stream.mark(self._events[turn])
        self._pending[turn] = _PendingReduce(bucket, used, input_buffer, grads=grads)

    def _land(self, turn: int) -> None:
        pending, self._pending[turn] = self._pending[turn], None
        if pending is None:
            return
        bucket, grads = pending.bucket, pending.grads
        if pending.pending is not None:
            try:
                pending.pending.wait()
            except AbsentRankError:
                self._explain(bucket.param_groups[0].state().index)
                raise
            grads = bucket.receive(pending.input_buffer, pending.used)
        else:
            self._streams.wait(self._events[turn])
            if any([group.is_offloaded for group in bucket.param_groups]):
                self._events[turn].synchronize()  # hooks and the optimizer read gradients on the CPU
        assert grads is not None
        for group, grad, used in zip(bucket.param_groups, grads, pending.used, strict=True):
            self._give(group, grad, used)

    def _give(self, group: ParamGroup, grad: torch.Tensor | None, used: list[bool]) -> None:
        """Make what was summed the gradients of a group's parameters."""
        if grad is None:
            self._is_carrying = True
            return
        group.attach(grad, used)
        if self._landed is not None:
            before = self._landed.get(group.position, grad)
            self._landed[group.position] = grad if before is grad else before + grad
        if group.pieces.has_hooks:
            self._run_hooks(group, used)

    def _run_hooks(self, group: ParamGroup, used: list[bool]) -> None:
        group.show_sharded()  # the module's backward is done with the others
        group.run_hooks(used)

    def _input_buffer(self, bucket: GradientBucket, turn: int) -> InputBuffer:
        if turn not in self._memory:
            self._memory[turn] = torch.empty(self._memory_size, dtype=torch.uint8, device=self._streams.device)
        memory = self._memory[turn]
        if not memory.untyped_storage().nbytes():
            memory.untyped_storage().resize_(self._memory_size)
        place = (turn, bucket.numbers)
        if place not in self._input_buffers:
            self._input_buffers[place] = bucket.input_buffer_in(memory)
        return self._input_buffers[place]


@attrs.frozen(eq=False)
class _BucketOrder:
    """The buckets of a backward in order, and the place there of each group by its number."""

    buckets: list[GradientBucket]
    places: dict[int, int]

    @classmethod
    def of(cls, param_groups: Sequence[ParamGroup]) -> _BucketOrder:
        buckets = buckets_of(param_groups)
        return cls(buckets, {number: place for place, bucket in enumerate(buckets) for number in bucket.numbers})

    def nodes(self) -> list[Any]:
        """The autograd nodes of the groups, in the order of `places`."""
        return [group.node for bucket in self.buckets for group in bucket.param_groups]


def _dtypes_of(param_groups: Sequence[ParamGroup]) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(group.compute_dtype, group.reduce_dtype) for group in param_groups]
