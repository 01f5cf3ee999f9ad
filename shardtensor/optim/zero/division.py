"""Which part of the parameters this rank steps, and what sends the new values of all parts to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.partition import Partition, assign_owners, bucket_bytes, plan_buckets
from shardtensor.optim.update_units import UpdateUnit
from shardtensor.optim.zero.values import OwnerBroadcast, ParamBucket

Part = tuple[torch.Tensor | None, int | None, Sequence[int] | None]
"""Of a parameter: the tensor that this rank steps, all of it or its elements in its range, if any; the rank that steps
all of it, or None; how many of its elements each rank steps, None if it has an owner, or if every rank steps it."""


class Division:
    """The parameters of an optimizer, divided among the ranks of a group.

    Args:
        unit: what the optimizer class updates together.
        as_views: make parameters with owners views of flat buffers.
        bucket_limit: the bytes at which a bucket is full; None for a share of all parameters.
        is_reduced: gradients are reduced in buckets: divide each by itself, also if parameters have owners.

    Attributes:
        buckets: the buckets that are divided; empty if they are not.
    """

    def __init__(
        self,
        group: Group,
        unit: UpdateUnit,
        partition: Partition,
        bucket_limit: float | None,
        *,
        as_views: bool,
        is_reduced: bool,
    ) -> None:
        self._group, self._unit, self._partition, self._as_views = group, unit, partition, as_views
        self._is_reduced, self._bucket_limit = is_reduced, bucket_limit
        self._loads = [0] * group.size
        self._broadcasts: list[OwnerBroadcast] = []
        self.buckets: list[ParamBucket] = []

    def divide(self, params: Sequence[torch.Tensor]) -> list[Part]:
        """Divide the parameters of a group."""
        if self._unit == "all":
            return [(param, None, None) for param in params]
        if self._is_reduced or self._partition == "ranges":
            return self._divide_buckets(params)
        owners = assign_owners([param.numel() for param in params], self._loads)
        self._broadcasts.append(OwnerBroadcast(params, owners, self._group, as_views=self._as_views))
        index = self._group.index
        return [(param if owner == index else None, owner, None) for param, owner in zip(params, owners, strict=True)]

    def _divide_buckets(self, params: Sequence[torch.Tensor]) -> list[Part]:
        limit = self._bucket_limit
        if limit is None:
            limit = bucket_bytes(sum(param.nbytes for param in params))
        plans = plan_buckets(
            [(param.dtype, param.device, param.requires_grad) for param in params],
            [param.numel() for param in params],
            self._group.size,
            [int(limit) // param.itemsize for param in params],
            self._partition,
            [self._grain(param) for param in params],
            self._loads,
        )
        has_owners = self._partition == "owners" or self._unit == "parameter"
        parts: dict[int, Part] = {}
        for plan in plans:
            bucket = ParamBucket(params, plan, self._group, unit=self._unit, is_reduced=self._is_reduced)
            self.buckets.append(bucket)
            for j, i in enumerate(plan.members):
                leaf = bucket.leaves.get(i)
                parts[i] = (leaf, plan.owner(j), None) if has_owners else (leaf, None, plan.ranges.sizes(j))
        return [parts[i] for i in range(len(params))]

    def _grain(self, param: torch.Tensor) -> int:
        """Return how many consecutive elements of a parameter one rank must hold."""
        if self._unit == "element":
            return 1
        return max(param.shape[1:].numel() if self._unit == "row" else param.numel(), 1)

    @property
    def _senders(self) -> list[OwnerBroadcast | ParamBucket]:
        return [*self._broadcasts, *self.buckets]

    def attach(self) -> None:
        """Make replaced parameters views of flat buffers again."""
        for each in self._senders:
            each.attach()

    def copy_from_first(self) -> None:
        """Overwrite the values of all buckets with those of the group's first rank. All ranks call it."""
        for bucket in self.buckets:
            self._group.broadcast(bucket.values)

    def set_gradients(self) -> None:
        """Set the gradients of leaves that are no parameters."""
        for bucket in self.buckets:
            bucket.set_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients of leaves that are no parameters."""
        for bucket in self.buckets:
            bucket.drop_gradients()

    @torch.no_grad()
    def send(self) -> None:
        """Send the new values to all ranks, and wait for them. All ranks call it."""
        senders = self._senders
        for each in senders:
            each.start()
        for each in senders:
            each.finish()
