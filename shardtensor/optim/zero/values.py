"""How the new values of parameters reach all ranks after a step: broadcasts from owners, or all-gathers of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.errors import RuleError, StaleParameterError
from shardtensor.layout.ranges import ANYWHERE, lay_out_owned
from shardtensor.optim.zero.partition import BucketPlan
from shardtensor.tensor.bucket import Bucket, FlatShard

_SENT_ALONE_BYTES = 1 << 18
"""Smaller parameters are copied into one buffer for each owner: a broadcast costs the host more than the copies."""

Params = Sequence[torch.Tensor]


class OwnerBroadcast:
    """Broadcasts each parameter from the rank that steps it.

    Args:
        params: the parameters, and the rank in `group` that `owners` gives for each.
        as_views: make the parameters views of one buffer for each owner; else their memory stays as it is.
    """

    def __init__(self, params: Params, owners: Sequence[int], group: Group, *, as_views: bool) -> None:
        self._group, self._params, self._as_views = group, list(params), as_views
        kinds: dict[Any, list[torch.Tensor]] = {}
        self._alone: list[tuple[int, torch.Tensor]] = []
        for param, owner in zip(params, owners, strict=True):
            if not as_views and param.is_contiguous() and param.nbytes >= _SENT_ALONE_BYTES:
                self._alone.append((owner, param))
            else:
                kinds.setdefault((owner, param.device, param.dtype), []).append(param)
        self._packed = [(key[0], _Flat(members, as_views)) for key, members in kinds.items()]
        self._own = [flat for owner, flat in self._packed if owner == group.index]
        self._others = [flat for owner, flat in self._packed if owner != group.index]
        self._pending: list[Pending] = []

    @torch.no_grad()
    def start(self) -> None:
        """Start to send the values. All ranks call it."""
        if self._group.size == 1:
            return
        for flat in [] if self._as_views else self._own:
            torch._foreach_copy_(flat.views, flat.params)
        # In the order of owners, which is the same on all ranks.
        messages = [(owner, param.detach()) for owner, param in self._alone]
        messages += [(owner, flat.buffer) for owner, flat in self._packed]
        self._pending = [self._group.broadcast_async(t, owner) for owner, t in sorted(messages, key=lambda m: m[0])]

    @torch.no_grad()
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
        """Make replaced parameters views of their buffers again, with their new values."""
        if self._as_views:
            for _, flat in self._packed:
                flat.attach()


class _Flat:
    """Parameters of one owner, device and dtype, and a buffer with a view for each."""

    def __init__(self, params: Params, as_views: bool) -> None:
        self.params = list(params)
        shapes = [tuple(param.shape) for param in params]
        ranges = lay_out_owned([param.numel() for param in params], 1, [0] * len(params))
        bucket = Bucket([ANYWHERE] * len(shapes), shapes, ranges, index=0)
        self.buffer = torch.zeros(ranges.total, dtype=params[0].dtype, device=params[0].device)
        self.views, _ = bucket.views(self.buffer)
        self._pointers = [view.data_ptr() for view in self.views]
        if as_views:
            self.attach()
            shard = FlatShard(self.buffer, bucket.starts)
            for i, param in enumerate(params):
                param._flat_shard = shard, i  # type: ignore[attr-defined]

    def attach(self) -> None:
        """Make parameters that are no views of the buffer views of it, with their values."""
        if [param.data_ptr() for param in self.params] != self._pointers:
            attach(self.params, self.views)


class ParamBucket:
    """Parameters that are views of one buffer, of which each rank steps one range.

    Attributes:
        leaves: by the number of a parameter, the tensor that this rank steps: the parameter's elements in its range.
        pieces: by the number of a parameter, the first and the last of those elements, of the flat parameter.
    """

    def __init__(self, params: Params, plan: BucketPlan, group: Group) -> None:
        self.plan, self._group = plan, group
        self.params = [params[i] for i in plan.members]
        shapes = [tuple(param.shape) for param in self.params]
        self._bucket = Bucket([ANYWHERE] * len(shapes), shapes, plan.ranges, group.index)
        first = self.params[0]
        self.values = torch.zeros(plan.ranges.total, dtype=first.dtype, device=first.device)
        self._views, _ = self._bucket.views(self.values)
        self._pointers = [view.data_ptr() for view in self._views]
        attach(self.params, self._views)
        self._shard = self._bucket.own(self.values)
        flat_shard = FlatShard(self._shard, self._bucket.starts)
        self.leaves: dict[int, torch.Tensor] = {}
        self.pieces: dict[int, tuple[int, int]] = {}
        for j, (i, shard) in enumerate(zip(plan.members, self._bucket.flat_shards(self._shard), strict=True)):
            piece = plan.ranges.piece(j, group.index)
            if piece[0] < piece[1] or (plan.owners is not None and plan.owners[j] == group.index):
                leaf: Any = shard if plan.owners is None else shard.view(shapes[j])
                leaf = leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())
                leaf._flat_shard = flat_shard, j
                self.leaves[i], self.pieces[i] = leaf, piece
        self._pending: Pending | None = None

    def set_gradients(self) -> None:
        """Set the gradients of leaves to this rank's elements of the parameters' gradients."""
        for i, param in zip(self.plan.members, self.params, strict=True):
            leaf, grad = self.leaves.get(i), param.grad
            if leaf is None:
                continue
            if grad is not None and grad.layout is not torch.strided:
                raise RuleError(
                    "a gradient is sparse, and ranges of flat buffers have dense gradients",
                    fix='make the embedding with sparse=False, or pass partition="owners"',
                )
            if grad is None or self.plan.owners is not None:
                leaf.grad = grad
            else:
                start, stop = self.pieces[i]
                leaf.grad = grad.reshape(-1)[start:stop]

    def start(self) -> None:
        """Start to gather the values. All ranks call it."""
        if self._group.size > 1:
            self._pending = self._group.all_gather_into(self.values, self._shard)

    def finish(self) -> None:
        """Wait until the parameters have their new values."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        torch._C._increment_version(self.params)

    def attach(self) -> None:
        """Make replaced parameters views of the buffer again, with their new values."""
        if [param.data_ptr() for param in self.params] != self._pointers:
            attach(self.params, self._views)


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
                "convert the model first, then make the optimizer and load the old one's state into it",
            )
    for param, view in zip(params, views, strict=True):
        if param.data_ptr() != view.data_ptr():
            view.copy_(param.detach())
            param.data = view
