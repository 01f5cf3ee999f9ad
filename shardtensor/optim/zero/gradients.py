"""Gradients that are reduced to the ranks that step them, while backward runs: ZeRO stage 2.

After backward a rank holds the gradients of the parameters, or of the elements, that it steps: ``grad`` of a parameter
is a ShardedTensor, so that norms and clipping are global.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.comm.streams import Streams
from shardtensor.errors import RuleError, some
from shardtensor.fsdp.backward_reducer import BackwardReducer
from shardtensor.fsdp.gradient_buckets import Gradient
from shardtensor.layout.ranges import REDUCE_BUFFERS
from shardtensor.optim.named_params import ParamRecord
from shardtensor.optim.zero.values import ParamBucket
from shardtensor.tensor.bucket import GradientBuffer
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


class PartitionedGradients:
    """Averages the gradients of parameters over the ranks, each to the ranks that step it, while backward runs.

    Args:
        records: by the id of a parameter: its name, and the layout of its gradient.
        group: the ranks.
        fetch: starts to copy the state of leaves to the device.
    """

    def __init__(
        self, records: Mapping[int, ParamRecord], group: Group, fetch: Callable[[Iterable[torch.Tensor]], None]
    ) -> None:
        self._group, self._records, self._fetch = group, records, fetch
        self.reducer = BackwardReducer(partial(_finish_if_alive, weakref.ref(self)))
        self._buckets: list[ReducedBucket] = []
        self._inputs: dict[Any, ReduceInputs] = {}
        self._hooks: list[Any] = []
        self._named: list[tuple[str, torch.Tensor]] = []
        self._trains: list[bool] = []  # whether each of these requires a gradient

    def set_buckets(self, buckets: Sequence[ParamBucket]) -> None:
        """Reduce the gradients of these buckets from now on."""
        self._buckets = [ReducedBucket(bucket, self._records, self._fetch) for bucket in buckets]
        self._inputs = {}
        for bucket in self._buckets:
            inputs = self._inputs.setdefault(bucket.kind, ReduceInputs(*bucket.kind))
            inputs.fit(bucket.total)
            bucket.inputs = inputs
        self._named = [pair for bucket in self._buckets for pair in zip(bucket.names, bucket.params, strict=True)]
        self._trains = []
        self.refresh()

    @property
    def is_on(self) -> bool:
        """Whether backward reduces gradients; else it accumulates them."""
        return self.reducer.is_on

    @is_on.setter
    def is_on(self, value: bool) -> None:
        self.reducer.is_on = value

    def drop(self) -> None:
        """Drop gradients that were set aside in a backward that did not reduce."""
        self.reducer.has_unreduced = False
        for bucket in self._buckets:
            bucket.accumulated.clear()

    def check(self) -> None:
        """Raise RuleError if a parameter has a gradient that backward has not reduced; then `refresh`."""
        if self.reducer.has_unreduced:
            raise RuleError(
                "parameters have gradients that no backward has reduced",
                {"because": "the last backward ran inside no_sync()"},
                "run the last backward before step() outside of no_sync()",
            )
        trains = [param.requires_grad for _, param in self._named]
        late = [
            name
            for (name, param), before, now in zip(self._named, self._trains, trains, strict=True)
            if now and not before and param.grad is not None
        ]
        if late:
            raise RuleError(
                "requires_grad was set after the last zero_grad(), so backward did not reduce these gradients",
                {"parameters": some(late)},
                "call requires_grad_() before optimizer.zero_grad()",
            )
        self.refresh(trains)

    def refresh(self, trains: list[bool] | None = None) -> None:
        """Forget a backward that an error stopped; hook parameters again if others require a gradient now."""
        self.reducer.start_over()
        if trains is None:
            trains = [param.requires_grad for _, param in self._named]
        if trains == self._trains:
            return
        self._trains = trains
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for bucket in self._buckets:
            bucket.gradients = []
            for i, param in enumerate(bucket.params):
                if param.requires_grad:
                    name = self._records[id(param)].name
                    bucket.gradients.append(Gradient(name, param, param, self._group, 1.0, param.dtype))
                    self._hooks.append(param.register_hook(partial(_set_aside, weakref.ref(bucket), i)))
        gradients = [gradient for bucket in self._buckets for gradient in bucket.gradients]
        self.reducer.set_buckets(gradients, [bucket for bucket in self._buckets if bucket.gradients])

    def finish(self, buckets: Sequence[ReducedBucket]) -> None:
        """Wait for the reductions, and set the gradients."""
        has = [used for bucket in buckets for used in bucket.used]
        first = buckets[0].params[0]
        flags: dict[str, Any] = {"dtype": torch.float32, "device": first.device}
        sent = torch.ones(len(has), **flags) if all(has) else torch.tensor(has, **flags)  # the host waits for a list
        pending = self._group.all_reduce_async(sent, "max")
        for inputs in self._inputs.values():
            inputs.join()
        found = pending.wait()
        used = iter(has if all(has) else found.ne(0).tolist())
        with torch.no_grad():
            for bucket in buckets:
                bucket.finish([next(used) for _ in bucket.used])


def _finish_if_alive(find: weakref.ref[PartitionedGradients], buckets: Sequence[ReducedBucket]) -> None:
    found = find()
    if found is not None:
        found.finish(buckets)


def _set_aside(find: weakref.ref[ReducedBucket], i: int, _: torch.Tensor) -> None:
    """Before autograd adds to the gradient of a parameter: set aside one that is reduced already."""
    bucket = find()
    if bucket is not None:
        grad = bucket.params[i].grad
        if bucket.accumulated if grad is None else isinstance(grad, ShardedTensor) and _adds_to(bucket.params[i]):
            bucket.set_aside(i)


def _adds_to(param: torch.Tensor) -> bool:
    """Whether the present backward adds to the gradient of a parameter, and does not only return it.

    The node is not kept: one from before a capture in a CUDA graph would run in another stream.
    """
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad
        return False


class ReducedBucket:
    """Gradients of a bucket of parameters that are reduced together.

    Attributes:
        gradients: of the parameters that require one.
        waiting: how many of them backward has not computed yet.
        pending: the reduction, once it is started.
        used: whether this rank has a gradient of each parameter.
        accumulated: gradients that were reduced in an earlier backward, by the number of the parameter in the bucket.
        inputs: buffers that buckets of this kind are packed in.
    """

    inputs: ReduceInputs
    waiting: int
    pending: Pending | None
    used: list[bool]

    def __init__(
        self,
        bucket: ParamBucket,
        records: Mapping[int, ParamRecord],
        fetch: Callable[[Iterable[torch.Tensor]], None],
    ) -> None:
        self._fetch = fetch
        self.params, self._bucket, self._group, self._values = bucket.params, bucket.bucket, bucket.group, bucket
        self.names = [records[id(param)].name for param in bucket.params]
        self._layouts: list[tuple[Any, tuple[int, ...]]] = []
        for param in bucket.params:
            layout = records[id(param)].layout
            assert layout is not None, "parameters in buckets are divided"
            self._layouts.append((layout, layout.local_shape(self._group.rank)))
        self.kind = (bucket.values.dtype, bucket.values.device)
        self.total = bucket.plan.ranges.total
        self.gradients: list[Gradient] = []
        self.accumulated: dict[int, torch.Tensor] = {}
        self._average: torch.Tensor | None = None

    def reset(self) -> None:
        """Wait for all gradients again."""
        self.waiting = len(self.gradients)
        self.pending, self.used = None, []

    def set_aside(self, i: int) -> None:
        """Set aside the gradient of a parameter if it is reduced already: `finish` adds it."""
        grad = self.params[i].grad
        if grad is None:  # the user dropped it
            self.accumulated.pop(i, None)
        if isinstance(grad, ShardedTensor):
            self.accumulated[i] = grad._local
            self.params[i].grad = None

    @torch.no_grad()
    def start(self) -> None:
        """Start to reduce the gradients, zeros for missing ones; this rank's full gradients are dropped."""
        self._values.attach()
        for i, param in enumerate(self.params):
            self.set_aside(i)
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise RuleError(
                    f"the gradient of `{self.names[i]}` is sparse, and flat buffers have dense gradients",
                    fix="make the embedding with sparse=False",
                )
        if self._values.pending is not None:
            self._values.refuse_early_use()
        self._average = torch.empty(self._bucket.chunk, dtype=self.kind[0], device=self.kind[1])
        self.used, self.pending = self.inputs.reduce(self, self._average, self._group)
        self._fetch(self._values.leaves.values())

    def buffer(self, memory: torch.Tensor) -> GradientBuffer:
        """Return the gradient buffer of this bucket in `memory`."""
        return self._bucket.gradient_buffer(memory[: self.total])

    def finish(self, used: Sequence[bool]) -> None:
        """Set the gradients of parameters of which any rank has one to their parts of the average."""
        assert self._average is not None and self.pending is not None, "it was started"
        average, self._average = self.pending.wait(), None
        accumulated, self.accumulated = self.accumulated, {}
        for i, shard in enumerate(self._bucket.flat_shards(average)):
            if not used[i] and i not in accumulated:
                continue
            layout, shape = self._layouts[i]
            # A rank without a 0-d parameter holds a number that nothing reads; a gradient scaler does.
            local = shard.view(shape) if shape or shard.numel() else shard.new_zeros(())
            if i in accumulated:
                local = local.add_(accumulated[i]) if used[i] else accumulated[i]
            self.params[i].grad = wrap(local, layout, None, self._group)


class ReduceInputs:
    """Buffers that gradients are packed in to be reduced, a few at a time, and the stream of the reductions."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device, self._size, self._turn = dtype, device, 0, 0
        self._streams = Streams(device)
        self._stream = self._streams.stream()
        self._memory: list[torch.Tensor] = []
        self._pending: list[tuple[Pending, Any] | None] = [None] * REDUCE_BUFFERS
        self._events = [self._streams.event() for _ in range(REDUCE_BUFFERS)]
        self._buffers: dict[tuple[int, int], GradientBuffer] = {}

    def fit(self, size: int) -> None:
        """Make the buffers large enough for a bucket of this many elements."""
        self._size = max(self._size, size)

    def reduce(self, bucket: ReducedBucket, out: torch.Tensor, group: Group) -> tuple[list[bool], Pending]:
        """Pack a bucket's gradients, drop them, and start to average them into `out`; return which there are."""
        self._streams.refresh()
        if not self._memory:
            kind: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
            self._memory = [torch.empty(self._size, **kind) for _ in range(REDUCE_BUFFERS)]
        turn = self._turn
        self._turn = (turn + 1) % REDUCE_BUFFERS
        before = self._pending[turn]
        if before is not None:
            before[0].wait()
            self._streams.wait(self._events[turn])
        key = id(bucket), turn
        if key not in self._buffers:
            self._buffers[key] = bucket.buffer(self._memory[turn])
        buffer = self._buffers[key]
        used = buffer.pack([param.grad for param in bucket.params])
        for param in bucket.params:
            param.grad = None
        self._stream.follow()
        with self._stream:
            pending = group.reduce_scatter_into(out, buffer.packed, "avg")
        self._stream.mark(self._events[turn])
        self._pending[turn] = pending, out
        return used, pending

    def join(self) -> None:
        """Make the caller's stream wait for all reductions."""
        self._stream.join()
        self._pending = [None] * REDUCE_BUFFERS
