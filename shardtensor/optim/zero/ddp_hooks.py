"""Communication hooks of DistributedDataParallel that step a `ZeroRedundancyOptimizer` in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardtensor.errors import RuleError
from shardtensor.optim.update_units import steps_apart
from shardtensor.optim.zero.optimizer import ZeroRedundancyOptimizer
from shardtensor.optim.zero.values import OwnerBroadcast

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def hook_with_zero_step(
    hook: Hook, ddp: nn.parallel.DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return a DDP communication hook that reduces gradients with `hook`, and steps at the end of backward.

    The optimizer updates the parameters of all buckets when the last bucket is reduced. When backward returns, all
    ranks have the new values. Do not scale the loss (GradScaler) and do not clip gradients: the update ran already.

    It updates in every backward after the first ``zero.zero_grad()``. If that call comes after the first backward, it
    applies the update of that backward. Without any such call, as in code for torch's class, the first two backwards
    (three with a static graph) do not update.

    Args:
        hook: reduces a bucket: `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook`, or any other
            hook.
        ddp: the module that the result is registered with.
        zero: made with ``overlap_with_ddp=True`` for the module's parameters.
        shard_buckets: ignored: parameters are assigned to ranks by size, whatever DDP's buckets are.

    Raises:
        ValueError: `zero` was made without ``overlap_with_ddp=True``.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> def prepare(ddp):
        ...     zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
        ...     ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
        ...     return zero
    """
    return _hook(hook, ddp, zero, is_interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: nn.parallel.DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Return the same hook as `hook_with_zero_step`, which steps while backward runs.

    A rank steps its parameters of a bucket, and starts to send their new values, when DDP has started to reduce the
    next bucket. A class that is none of torch's and does not state its ``update_unit`` may update parameters together:
    it is stepped at the end of backward.

    Args, errors and example: as `hook_with_zero_step`.
    """
    return _hook(hook, ddp, zero, is_interleaved=True)


def _hook(
    hook: Hook, ddp: nn.parallel.DistributedDataParallel, zero: ZeroRedundancyOptimizer, is_interleaved: bool
) -> Hook:
    if not zero.overlap_with_ddp:
        raise ValueError(
            "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook properly"
        )
    if ddp.find_unused_parameters and not ddp.static_graph:
        raise RuleError(
            "DDP reduces unused parameters as zeros, so a step in its backward would update them",
            fix="find_unused_parameters=False if all are used; else no hook, no overlap_with_ddp, and zero.step()",
        )
    overlap = DDPOverlap(zero, skipped_at_most=3 if ddp.static_graph else 2)
    zero.overlap = overlap

    def reduce_and_step(state, bucket):  # without annotations: DDP refuses those that are text
        future = hook(state, bucket)
        overlap.add(bucket, future, is_interleaved)
        return future

    return reduce_and_step


class DDPOverlap:
    """Steps parameters when DDP has reduced their bucket.

    All collectives are called in the thread that runs backward, in one order on all ranks: the reduction of a bucket,
    then the broadcasts of an earlier one. So they work with any backend.

    Args:
        skipped_at_most: how many backwards do not step if `begin` is never called.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer, skipped_at_most: int) -> None:
        self._zero, self._skipped_at_most = zero, skipped_at_most
        self._may_split = steps_apart(zero.optimizer_class)
        self._reduced: list[tuple[dist.GradBucket, torch.futures.Future[Any]]] = []
        self._sent: list[OwnerBroadcast] = []
        self._broadcasts: dict[tuple[int, ...], OwnerBroadcast] = {}
        self._params: list[torch.Tensor] = []
        self._has_begun = False
        self._skipped = 0

    def begin(self) -> None:
        """Step in every backward from now on; step for the last backward now if it is the only one so far."""
        if not self._has_begun and self._skipped == 1:
            grads = {param: param.grad for param in self._params if param.grad is not None}
            self._step_and_send(self._params, grads)
            self._finish()
        self._has_begun = True

    def add(self, bucket: dist.GradBucket, future: torch.futures.Future[Any], is_interleaved: bool) -> None:
        """Take a bucket whose reduction has started; DDP adds its buckets in order. Steps those added before it."""
        is_last = bucket.is_last()
        if not self._has_begun:
            if bucket.index() == 0:
                self._params = []
            self._params += bucket.parameters()
            if is_last:
                self._skipped += 1
                self._has_begun = self._skipped == self._skipped_at_most
            return
        if is_interleaved and self._may_split:
            self._step_reduced()
        self._reduced.append((bucket, future))
        if is_last:
            self._step_reduced()
            self._finish()

    def _step_reduced(self) -> None:
        """Step the parameters of the buckets added so far."""
        reduced, self._reduced = self._reduced, []
        groups = [reduced[i : i + 1] for i in range(len(reduced))] if self._may_split else [reduced]
        for buckets in groups:
            grads: dict[torch.Tensor, torch.Tensor] = {}
            for bucket, future in buckets:
                grads.update(zip(bucket.parameters(), _gradients(bucket, future.wait()), strict=True))
            if grads:
                self._step_and_send(list(grads), grads)

    @torch.no_grad()
    def _step_and_send(self, params: Sequence[torch.Tensor], grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._zero.step_with(grads)
        key = tuple(map(id, params))
        if key not in self._broadcasts:
            owners = [self._zero.partitioned.owner_of(param) for param in params]
            self._broadcasts[key] = OwnerBroadcast(params, owners, self._zero.group, as_views=False)
        self._broadcasts[key].start()
        self._sent.append(self._broadcasts[key])

    @torch.no_grad()
    def _finish(self) -> None:
        sent, self._sent = self._sent, []
        for each in sent:
            each.finish()


def _gradients(bucket: dist.GradBucket, result: Any) -> list[torch.Tensor]:
    """Return the gradients of a bucket's parameters in the result of its reduction."""
    flat = result[0] if isinstance(result, list | tuple) else result
    views = bucket.gradients()
    if flat.data_ptr() == bucket.buffer().data_ptr():
        return views
    start = bucket.buffer().storage_offset()
    return [flat.as_strided(view.shape, view.stride(), view.storage_offset() - start) for view in views]
