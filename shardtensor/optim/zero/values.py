"""How the new values of parameters reach all ranks after a step: broadcasts from owners, or all-gathers of buckets.

They may be sent while the next forward runs, which waits for each before its first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardtensor.comm.group import Group, Pending
from shardtensor.comm.streams import Streams
from shardtensor.comm.untraced import untraced
from shardtensor.errors import RuleError, StaleParameterError, some
from shardtensor.layout.partition import SENT_ALONE_BYTES, BucketPlan, steps_as_one
from shardtensor.layout.ranges import ANYWHERE, lay_out_owned
from shardtensor.optim.update_units import UpdateUnit
from shardtensor.tensor.bucket import Bucket, FlatShard
from shardtensor.tensor.sharded_tensor import ShardedTensor

Params = Sequence[torch.Tensor]


class OwnerBroadcast:
    """Broadcasts each parameter from the rank that steps it.

    Args:
        params: the parameters, and the rank in `group` that `owners` gives for each.
        as_views: make the parameters views of one buffer for each owner; else their memory stays as it is.
    """

    def __init__(self, params: Params, owners: Sequence[int], group: Group, *, as_views: bool) -> None:
        self._group, self._params, self._as_views = group, list(params), as_views
        self._owners = list(owners)
        self._pending: list[Pending] = []
        self._pack()

    def _pack(self) -> None:
        """Assign the parameters to messages."""
        group, as_views = self._group, self._as_views
        self._kinds = [(param.dtype, param.device) for param in self._params]
        kinds: dict[Any, list[torch.Tensor]] = {}
        self._alone: list[tuple[int, torch.Tensor]] = []
        for param, owner in zip(self._params, self._owners, strict=True):
            if not as_views and param.is_contiguous() and param.nbytes >= SENT_ALONE_BYTES:
                self._alone.append((owner, param))
            else:
                kinds.setdefault((owner, param.device, param.dtype), []).append(param)
        self._packed = [(key[0], _Flat(members, as_views)) for key, members in kinds.items()]
        self._own = [flat for owner, flat in self._packed if owner == group.index]
        self._others = [flat for owner, flat in self._packed if owner != group.index]

    def start(self) -> None:
        """Start to send the values. All ranks call it, without recording gradients."""
        if self._group.size == 1:
            return
        for flat in [] if self._as_views else self._own:
            torch._foreach_copy_(flat.views, flat.params)
        alone = [self._group.broadcast_async(param.detach(), owner) for owner, param in self._alone]
        packed = [self._group.broadcast_async(flat.buffer, owner) for owner, flat in self._packed]
        self._pending = alone + packed

    def finish(self) -> None:
        """Wait until the parameters have their new values."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.wait()
        if self._group.size == 1:
            return
        for flat in [] if self._as_views else self._others:
            torch._foreach_copy_(flat.params, flat.views)
        torch._C._increment_version(self._params)

    def attach(self) -> None:
        """Make replaced parameters views of their buffers again; pack converted ones anew if they are no views."""
        if self._as_views:
            for _, flat in self._packed:
                flat.attach()
        elif [(param.dtype, param.device) for param in self._params] != self._kinds:
            self._pack()


class _Flat:
    """Parameters of one owner, device and dtype, and a buffer with a view for each."""

    def __init__(self, params: Params, as_views: bool) -> None:
        self.params = list(params)
        shapes = [tuple(param.shape) for param in params]
        ranges = lay_out_owned([param.numel() for param in params], 1, [0] * len(params))
        self.buffer = torch.zeros(ranges.total, dtype=params[0].dtype, device=params[0].device)
        self.views, _ = Bucket([ANYWHERE] * len(shapes), shapes, ranges, index=0).views(self.buffer)
        self._pointers = [view.data_ptr() for view in self.views]
        if as_views:
            self.attach()

    def attach(self) -> None:
        """Make parameters that are no views of the buffer views of it, with their values."""
        if list(map(_data_ptr, self.params)) != self._pointers:
            attach(self.params, self.views)


class ParamBucket:
    """Parameters that are views of one buffer, of which each rank steps one range.

    Args:
        unit: what the optimizer class updates together.
        is_reduced: gradients are reduced to this rank's range, and are adjacent there.

    Attributes:
        leaves: by the number of a parameter, the tensor that this rank steps: all of the parameter, whole rows, or
            the flat elements in its range.
        pending: the all-gather of new values, once it is started.
    """

    def __init__(self, params: Params, plan: BucketPlan, group: Group, *, unit: UpdateUnit, is_reduced: bool) -> None:
        self.plan, self.group = plan, group
        self.params = [params[i] for i in plan.members]
        shapes = [tuple(param.shape) for param in self.params]
        self.bucket = Bucket([ANYWHERE] * len(shapes), shapes, plan.ranges, group.index)
        first = self.params[0]
        self.values = torch.zeros(plan.ranges.total, dtype=first.dtype, device=first.device)
        self._views, _ = self.bucket.views(self.values)
        self._pointers = [view.data_ptr() for view in self._views]
        attach(self.params, self._views)
        self._shard = self.bucket.own(self.values)
        flat_shard = FlatShard(self._shard, self.bucket.starts)
        as_one = unit == "element" and steps_as_one(plan, first.itemsize, is_reduced)
        self._packs = as_one and not is_reduced
        self.leaves: dict[int, torch.Tensor] = {}
        self._own: list[tuple[int, torch.Tensor, torch.Tensor, tuple[int, int]]] = []
        for j, (i, shard) in enumerate(zip(plan.members, self.bucket.flat_shards(self._shard), strict=True)):
            start, stop = plan.ranges.piece(j, group.index)
            if start == stop and (plan.ranges.lengths[j] or group.index):  # the first rank steps what has no elements
                continue
            leaf: Any = shard
            if stop - start == plan.ranges.lengths[j]:
                leaf = shard.view(shapes[j])
            elif unit == "row":
                leaf = shard.view(-1, *shapes[j][1:])
            leaf = leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())
            if as_one:
                leaf._flat_shard = flat_shard, j
            self.leaves[i] = leaf
            self._own.append((j, self.params[j], leaf, (start, stop)))
        self._packed: list[torch.Tensor] = []
        self.pending: Pending | None = None

    def set_gradients(self) -> None:
        """Set the gradients of leaves to this rank's elements of the parameters' gradients."""
        found = [_own_elements(param.grad, leaf.shape, piece) for _, param, leaf, piece in self._own]
        if self._packs and found and not any([grad is None for grad in found]):
            found = self._pack(found)  # type: ignore[arg-type]
        for (_, _, leaf, _), grad in zip(self._own, found, strict=True):
            leaf.grad = grad

    @torch.no_grad()
    def _pack(self, grads: list[torch.Tensor]) -> list[Any]:
        """Return copies of gradients that are adjacent, so that they are stepped as one."""
        if not self._packed:
            shards = self.bucket.flat_shards(torch.zeros_like(self._shard))
            self._packed = [shards[j].view(leaf.shape) for j, _, leaf, _ in self._own]
        torch._foreach_copy_(self._packed, grads)
        return self._packed

    def drop_gradients(self) -> None:
        """Drop the gradients of leaves, which keep the memory of parameters' gradients."""
        for _, _, leaf, _ in self._own:
            leaf.grad = None

    def start(self) -> None:
        """Start to gather the values. All ranks call it."""
        if self.group.size > 1:
            self.pending = self.group.all_gather_into(self.values, self._shard)

    def finish(self) -> None:
        """Wait until the parameters have their new values."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        torch._C._increment_version(self.params)

    def refuse_early_use(self) -> None:
        """Raise RuleError if parameters have gradients; called while their values are being sent."""
        shapes = [str(tuple(param.shape)) for param in self.params if type(param.grad) is torch.Tensor]
        if shapes:
            raise RuleError(
                "forward read parameters before they had the values of the last step",
                {"of shapes": some(shapes)},
                "call optimizer.wait() before forward, or pass the module whose forward reads them as module=",
            )

    def attach(self) -> None:
        """Make replaced parameters views of the buffer again, with their new values."""
        if list(map(_data_ptr, self.params)) != self._pointers:
            attach(self.params, self._views)


_data_ptr = torch.Tensor.data_ptr


def _own_elements(grad: Any, shape: torch.Size, piece: tuple[int, int]) -> torch.Tensor | None:
    """Return the elements `piece` of a parameter's gradient, in the shape of the leaf."""
    if grad is None or (type(grad) is torch.Tensor and grad.shape == shape and grad.layout is torch.strided):
        return grad
    if isinstance(grad, ShardedTensor):
        return grad._local.view(shape)
    if grad.layout is not torch.strided:
        raise RuleError(
            "a gradient is sparse, and ranges of flat buffers have dense gradients",
            fix='make the embedding with sparse=False, or pass partition="owners"',
        )
    return grad.reshape(-1)[piece[0] : piece[1]].view(shape)


@torch.no_grad()
def attach(params: Params, views: Params) -> None:
    """Make parameters views of a buffer, with their values.

    Raises:
        StaleParameterError: a parameter was converted to another shape, dtype or device.
    """
    for param, view in zip(params, views, strict=True):
        if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
            raise StaleParameterError(
                "a parameter was converted since the optimizer was made; nothing was stepped",
                {
                    "now": f"{tuple(param.shape)} {param.dtype} on {param.device}",
                    "before": f"{tuple(view.shape)} {view.dtype} on {view.device}",
                },
                "convert the model first; else keep state_dict(), delete this optimizer, and load it into a new one",
            )
    for param, view in zip(params, views, strict=True):
        if param.data_ptr() != view.data_ptr():
            view.copy_(param.detach())
            param.data = view


class ForwardWaits:
    """Sends the values of buckets, and makes the forward of a module wait for them.

    A submodule with parameters of its own waits for these and for those of its submodules, which it may read without
    calling them. Parameters of other modules are waited for at once.

    Args:
        module: has the parameters.
        buckets: in the order of their gradients: the last parameters first.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[ParamBucket]) -> None:
        first = buckets[0].params[0]
        self._streams = Streams(first.device)
        self._stream = self._streams.stream()
        self._buckets = list(reversed(buckets))
        self._events = {bucket: self._streams.event() for bucket in self._buckets}
        bucket_of = {id(param): bucket for bucket in buckets for param in bucket.params}
        waited: set[ParamBucket] = set()
        self._handles: list[Any] = [
            # A module that only reads parameters of its submodules does not wait for them. Backward notices; without
            # one, no later forward reads old values.
            module.register_forward_hook(WaitHook(self, self._buckets, with_grad=False)),
            module.register_load_state_dict_pre_hook(WaitHook(self, self._buckets)),
        ]
        for submodule in module.modules():
            if any(param is not None for param in submodule._parameters.values()):
                found = [bucket_of[id(param)] for param in submodule.parameters() if id(param) in bucket_of]
                needed = list(dict.fromkeys(found))
                waited.update(needed)
                self._handles.append(submodule.register_forward_pre_hook(WaitHook(self, needed), prepend=True))
            self._handles.append(submodule.register_state_dict_pre_hook(WaitHook(self, self._buckets)))
        self._outside = [bucket for bucket in self._buckets if bucket not in waited]

    def remove(self) -> None:
        """Wait for all values, and remove the hooks from the module."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def send(self) -> None:
        """Start to send the values to all ranks, in the order of their use. All ranks call it."""
        self._streams.refresh()
        self._stream.follow()
        for bucket in self._buckets:
            with self._stream:
                bucket.start()
            self._stream.mark(self._events[bucket])
        self.wait(self._outside)

    def check(self) -> None:
        """Raise RuleError if backward computed gradients of parameters whose values are still being sent."""
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.refuse_early_use()

    def wait(self, buckets: Sequence[ParamBucket] | None = None) -> None:
        """Wait for buckets that are being sent; for all by default."""
        pending = [bucket for bucket in (self._buckets if buckets is None else buckets) if bucket.pending is not None]
        if pending:
            self._streams.refresh()
        for bucket in pending:
            bucket.finish()
            self._streams.wait(self._events[bucket])


class WaitHook:
    """Waits before a module's forward, or before its state dict is made or loaded.

    Args:
        with_grad: whether it waits if gradients are recorded, too.
    """

    def __init__(self, waits: ForwardWaits, buckets: Sequence[ParamBucket], with_grad: bool = True) -> None:
        self._waits, self._buckets, self._with_grad = waits, buckets, with_grad

    def __reduce__(self) -> Any:
        self._waits.wait()  # the module is being copied
        return partial, (_do_nothing,)  # the copy has parameters of its own

    @untraced("the wait for new values cannot be compiled: compile submodules without fullgraph=True")
    def __call__(self, *args: Any) -> None:
        """Wait for the buckets that are being sent."""
        for bucket in self._buckets:
            if bucket.pending is not None and (self._with_grad or not torch.is_grad_enabled()):
                self._waits.wait(self._buckets)
                return


def _do_nothing(*args: Any) -> None:
    """The hook of a copy of a module."""
