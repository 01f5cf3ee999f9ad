"""Gradients of many parameters averaged in few messages: each bucket of them is one all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardtensor.comm.group import Pending
from shardtensor.parallel.gradients import Gradient, sparse_error
from shardtensor.tensor.copied import wrote
from shardtensor.tensor.sharded_tensor import ShardedTensor

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the wire is busy early."""


class Bucket:
    """Gradients of one kind that are sent together.

    Every rank of the group must learn of a gradient that no rank has, for it stays None, as in the dense program; and
    one that only others have becomes this rank's as well. So the last bucket of a kind ends with one flag for each
    gradient of the kind: whether this rank has it. The flags are read only where one is missing.

    Attributes:
        gradients: in the order they are packed.
        flagged: the gradients of the whole kind in the kind's last bucket, else none.
        waiting: how many of them backward has yet to bring.
    """

    def __init__(self, gradients: Sequence[Gradient], flagged: Sequence[Gradient] = ()) -> None:
        self.gradients = list(gradients)
        self.flagged = list(flagged)
        self.waiting = len(self.gradients)
        self.group = self.gradients[0].group
        self._missing: list[bool] = []
        self._pending: Pending | None = None
        self._is_packed = True

    @property
    def is_started(self) -> bool:
        return self._pending is not None

    def reset(self) -> None:
        """Forget what was sent, and wait for all gradients anew."""
        self.waiting, self._pending, self._missing = len(self.gradients), None, []

    @torch.no_grad()
    def start(self) -> None:
        """Send what this rank has; zeros for what it lacks. All ranks of the group start their buckets in one order."""
        grads: list[Any] = [gradient.leaf.grad for gradient in self.gradients]
        for gradient, grad in zip(self.gradients, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise sparse_error(gradient.name)
        self._missing = [grad is None for grad in grads]
        self._is_packed = not self._goes_as_it_is(grads)
        self._pending = self.group.all_reduce_async(self._pack(grads) if self._is_packed else grads[0], "avg")

    def _goes_as_it_is(self, grads: list[Any]) -> bool:
        """A gradient that fills a bucket alone is averaged in its own memory."""
        grad = grads[0]
        if len(grads) > 1 or self.flagged or grad is None or grad.requires_grad:
            return False
        return grad.is_contiguous() and grad.dtype is self.gradients[0].dtype

    def _pack(self, grads: list[Any]) -> torch.Tensor:
        dtype, device = self.gradients[0].dtype, self.gradients[0].leaf.device
        pieces = [
            torch.zeros(gradient.leaf.numel(), dtype=dtype, device=device)
            if grad is None
            else grad.reshape(-1).to(dtype)
            for gradient, grad in zip(self.gradients, grads, strict=True)
        ]
        if self.flagged:
            has = [gradient.leaf.grad is not None for gradient in self.flagged]
            ones = torch.ones(len(has), dtype=dtype, device=device)  # made there: a list would be waited for
            pieces.append(ones if all(has) else torch.tensor(has, dtype=dtype, device=device))
        return torch.cat(pieces)

    def wait(self) -> None:
        """Return when the averages are there (on cuda: when the current stream would see them)."""
        assert self._pending is not None, "a bucket is started before it is waited for"
        self._result = self._pending.wait()

    @property
    def lacks_some(self) -> bool:
        """Whether a gradient of this bucket was missing on this rank."""
        return any(self._missing)

    def flags(self) -> list[bool]:
        """Whether any rank has each of `flagged`."""
        return self._result[-len(self.flagged) :].ne(0).tolist()

    @torch.no_grad()
    def finish(self, is_used: dict[Gradient, bool]) -> None:
        """Make the averages the gradients; `is_used` says of those this rank lacks whether another rank has them."""
        views: Sequence[torch.Tensor] = ()
        if self._is_packed:
            sizes = [gradient.leaf.numel() for gradient in self.gradients]
            views = self._result[: sum(sizes)].split(sizes)
        into, of = [], []
        for i, view in enumerate(views):
            gradient = self.gradients[i]
            leaf, grad = gradient.leaf, gradient.leaf.grad
            if grad is not None and not grad.requires_grad:
                into.append(grad)
                of.append(view.view(grad.shape))
            elif grad is not None or is_used[gradient]:
                leaf.grad = view.view(leaf.shape).to(leaf.dtype if grad is None else grad.dtype, copy=True)
        if into:
            torch._foreach_copy_(into, of)
        for gradient in self.gradients:
            if isinstance(gradient.param, ShardedTensor) and gradient.param._grad_shell is not None:
                wrote(gradient.param.grad)
        self._pending = self._result = None  # type: ignore[assignment]


def make_buckets(gradients: Iterable[Gradient], bucket_bytes: float) -> list[Bucket]:
    """Deal gradients to buckets, in the order in which all ranks send them: the last parameters first.

    Each kind fills buckets of its own. Gradients that no other rank has a copy of need none.
    """
    kinds: dict[Any, list[Gradient]] = {}
    open_: dict[Any, list[Gradient]] = {}
    filled: list[list[Gradient]] = []
    for gradient in reversed([g for g in gradients if g.group.size > 1]):
        kinds.setdefault(gradient.kind, []).append(gradient)
        bucket = open_.setdefault(gradient.kind, [])
        bucket.append(gradient)
        limit = bucket_bytes if filled else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if sum(g.leaf.numel() * g.dtype.itemsize for g in bucket) >= limit:
            filled.append(open_.pop(gradient.kind))
    filled += open_.values()
    last = {bucket[0].kind: i for i, bucket in enumerate(filled)}
    return [
        Bucket(bucket, kinds[bucket[0].kind] if last[bucket[0].kind] == i else ()) for i, bucket in enumerate(filled)
    ]


def finish(buckets: Sequence[Bucket]) -> None:
    """Wait for buckets that were all started, and make the averages the gradients."""
    for bucket in buckets:
        bucket.wait()
    lacking = {bucket.gradients[0].kind for bucket in buckets if bucket.lacks_some}
    is_used: dict[Gradient, bool] = {}
    for bucket in buckets:
        if bucket.flagged and bucket.gradients[0].kind in lacking:
            is_used.update(zip(bucket.flagged, bucket.flags(), strict=True))
    for bucket in buckets:
        bucket.finish(is_used)
