"""Which part of the parameters this rank steps, its step, and what sends the new values of all parts to all ranks.

The step itself sends nothing. The state of the part may be on the CPU between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import optim

from shardtensor.comm.group import Group
from shardtensor.comm.streams import Streams
from shardtensor.layout.partition import Partition, assign_owners, bucket_bytes, plan_buckets
from shardtensor.optim.flat_groups import FlatGroups, step_without_hooks
from shardtensor.optim.update_units import UpdateUnit
from shardtensor.optim.zero.arguments import copy_options
from shardtensor.optim.zero.values import OwnerBroadcast, ParamBucket


@attrs.define
class Parts:
    """How some parameters are divided; lists and dicts are by their numbers.

    Attributes:
        leaves: the tensors that this rank steps: parameters, or their elements in its range.
        owners: the rank that steps all of a parameter, or None.
        sizes: how many elements of a parameter each rank steps; None if it has an owner, or if every rank steps it.
    """

    leaves: dict[int, torch.Tensor]
    owners: list[int | None]
    sizes: list[Sequence[int] | None]


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

    def divide(self, params: Sequence[torch.Tensor]) -> Parts:
        """Divide the parameters of a group."""
        nobody = Parts(dict(enumerate(params)), [None] * len(params), [None] * len(params))
        if self._unit == "all":
            return nobody
        if self._is_reduced or self._partition == "ranges":
            return self._divide_buckets(params, nobody)
        owners = assign_owners([param.numel() for param in params], self._loads)
        self._broadcasts.append(OwnerBroadcast(params, owners, self._group, as_views=self._as_views))
        leaves = {i: param for i, param in enumerate(params) if owners[i] == self._group.index}
        return Parts(leaves, list(owners), nobody.sizes)

    def _divide_buckets(self, params: Sequence[torch.Tensor], parts: Parts) -> Parts:
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
        parts.leaves = {}
        for plan in plans:
            bucket = ParamBucket(params, plan, self._group, unit=self._unit, is_reduced=self._is_reduced)
            self.buckets.append(bucket)
            parts.leaves.update(bucket.leaves)
            for j, i in enumerate(plan.members):
                if self._partition == "owners" or self._unit == "parameter":
                    parts.owners[i] = plan.owner(j)
                else:
                    parts.sizes[i] = plan.ranges.sizes(j)
        return parts

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


Groups = list[dict[str, Any]]


class OffloadedState:
    """Keeps the state of an optimizer in pinned memory of the CPU between steps. On a CPU it only steps.

    `fetch` starts to copy state to the device, in backward if gradients are reduced there; `step` waits for it. After
    the step the state is copied back beside the next forward. So the device holds it when it holds few activations.

    Args:
        optimizer: this rank's optimizer.
        device: of the parameters.
    """

    def __init__(self, optimizer: optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._streams = optimizer, Streams(device)
        self._in, self._out = self._streams.stream(), self._streams.stream()
        self._on_cpu: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._fetched: dict[torch.Tensor, Any] = {}  # by the tensor that is stepped: the event of its copies
        self._put_back: dict[torch.Tensor, Any] = {}  # the same for copies to the CPU

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to copy the state of tensors that will be stepped to the device."""
        missing = [x for x in tensors if x not in self._fetched] if self._streams.is_cuda else []
        if not missing:
            return
        self._streams.refresh()
        self._in.follow()
        event = self._streams.event()
        for x in missing:
            state = self._optimizer.state.get(x) or {}
            if x in self._put_back:
                self._in.wait(self._put_back[x])
            for key, value in _large(state):
                if value.device != self._streams.device:
                    state[key] = torch.empty_like(value, device=self._streams.device)
                    with self._in:
                        state[key].copy_(value, non_blocking=True)
            self._fetched[x] = event
        self._in.mark(event)

    def step(self, step: Callable[[], Any]) -> Any:
        """Call `step` when the state is on the device, and start to copy it to the CPU; return its result."""
        if not self._streams.is_cuda:
            return step()
        self.fetch(x for group in self._optimizer.param_groups for x in group["params"] if x.grad is not None)
        fetched, self._fetched = self._fetched, {}
        self._streams.refresh()
        for event in {id(event): event for event in fetched.values()}.values():
            self._streams.wait(event)
        result = step()
        self._out.follow()
        for x in fetched:
            self._put(x)
        return result

    def _put(self, x: torch.Tensor) -> None:
        """Start to copy the state of a tensor to the CPU."""
        state, on_cpu = self._optimizer.state.get(x) or {}, self._on_cpu.setdefault(x, {})
        for key, value in _large(state):
            kept = on_cpu.get(key)
            if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
                kept = on_cpu[key] = torch.empty_like(value, device="cpu", pin_memory=True)
            with self._out:
                kept.copy_(value, non_blocking=True)
            self._out.uses(value)
            state[key] = kept
        self._out.mark(self._put_back.setdefault(x, self._streams.event()))

    def synchronize(self) -> None:
        """Make the host wait until the state is on the CPU."""
        self._out.synchronize()


def _large(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0]


class PartStep:
    """Steps an optimizer over this rank's part.

    Args:
        optimizer: over the leaves of the part.
        is_elementwise: whether it may step adjacent leaves as one tensor.
        offloaded: keeps its state on the CPU, or None.
    """

    def __init__(
        self, optimizer: optim.Optimizer, division: Division, *, is_elementwise: bool, offloaded: OffloadedState | None
    ) -> None:
        self._optimizer, self._division, self._is_elementwise = optimizer, division, is_elementwise
        self.offloaded = offloaded
        self.flat_groups = FlatGroups(optimizer)

    def step(self, groups: Groups, closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]) -> Any:
        """Step with the hyperparameters of `groups`, and copy back those that the step changed; return the loss."""
        own = self._optimizer.param_groups
        copy_options(groups, own)
        step = partial(step_without_hooks, self._optimizer, **kwargs)
        as_one = self._is_elementwise and bool(self._division.buckets)
        if as_one or self.offloaded is not None:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._division.set_gradients()
            if self.offloaded is not None:
                step = partial(self.offloaded.step, step)
            self.flat_groups.step(own, step) if as_one else step()
        elif closure is None:
            self._division.set_gradients()
            loss = step()
        else:
            loss = step(closure=partial(self._closure, closure) if callable(closure) else closure)
        copy_options(own, groups)
        return loss

    def _closure(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._division.set_gradients()
        return loss

    def fetch(self, leaves: Iterable[torch.Tensor]) -> None:
        """Start to copy the state of leaves to the device, if it is kept on the CPU."""
        if self.offloaded is not None:
            self.offloaded.fetch([self.flat_groups.stepped_for(leaf) for leaf in leaves])

    def step_with(self, grads: Mapping[torch.Tensor, torch.Tensor], groups: Groups) -> None:
        """Step the leaves that are parameters with a gradient here, with that gradient."""
        own = self._optimizer.param_groups
        params = [group["params"] for group in own]
        stepped = [[param for param in members if param in grads] for members in params]
        before = {param: param.grad for members in stepped for param in members}
        try:
            for group, members in zip(own, stepped, strict=True):
                group["params"] = members
            for param in before:
                param.grad = grads[param]
            self.step(groups, None, {})
        finally:
            for group, members in zip(own, params, strict=True):
                group["params"] = members
            for param, grad in before.items():
                param.grad = grad
