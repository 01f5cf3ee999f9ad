"""Gradients of many parameters averaged in few messages: each bucket of them is one all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardtensor.comm.group import Pending
from shardtensor.parallel.gradients import Gradient, sparse_error

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
        self._dtype, self._device = self.gradients[0].dtype, self.gradients[0].leaf.device
        self._has_empty = any(g.leaf.numel() == 0 for g in self.gradients)
        self._grads: list[Any] = []
        self._is_plain = self._is_packed = True
        self._pending: Pending | None = None
        self._result: torch.Tensor | None = None

    @property
    def is_started(self) -> bool:
        return self._pending is not None

    def reset(self) -> None:
        """Forget what was sent, and wait for all gradients anew."""
        self.waiting, self._grads, self._pending, self._result = len(self.gradients), [], None, None

    @torch.no_grad()
    def start(self) -> None:
        """Send what this rank has; zeros for what it lacks. All ranks of the group start their buckets in one order."""
        grads = self._grads = [gradient.leaf.grad for gradient in self.gradients]
        self._is_plain = not self._has_empty and all(
            grad is not None and grad.dtype is self._dtype and grad.layout is torch.strided and not grad.requires_grad
            for grad in grads
        )
        only = grads[0] if self._is_plain and len(grads) == 1 and not self.flagged else None
        self._is_packed = only is None or not only.is_contiguous()  # what fills a bucket alone goes as it is
        self._pending = self.group.all_reduce_async(only if not self._is_packed else self._pack(grads), "avg")  # type: ignore[arg-type]

    def _pack(self, grads: list[Any]) -> torch.Tensor:
        if self._is_plain:
            pieces = grads
        else:
            pieces = [self._flat(g, grad) for g, grad in zip(self.gradients, grads, strict=True)]
        if self.flagged:
            has = [gradient.leaf.grad is not None for gradient in self.flagged]
            ones = torch.ones(len(has), dtype=self._dtype, device=self._device)  # made there: a list is waited for
            pieces = [*pieces, ones if all(has) else torch.tensor(has, dtype=self._dtype, device=self._device)]
        return torch._utils._flatten_dense_tensors(pieces)

    def _flat(self, gradient: Gradient, grad: torch.Tensor | None) -> torch.Tensor:
        if grad is None:
            return torch.zeros(gradient.leaf.numel(), dtype=self._dtype, device=self._device)
        if grad.layout is not torch.strided:
            raise sparse_error(gradient.name)
        return grad.reshape(-1).to(self._dtype, copy=True)

    def wait(self) -> None:
        """Return when the averages are there (on cuda: when the current stream would see them)."""
        assert self._pending is not None, "a bucket is started before it is waited for"
        self._result = self._pending.wait()

    @property
    def lacks_some(self) -> bool:
        """Whether a gradient of this bucket was missing on this rank."""
        return not self._is_plain and any(grad is None for grad in self._grads)

    def flags(self) -> list[bool]:
        """Whether any rank has each of `flagged`."""
        assert self._result is not None, "a bucket is waited for before it is read"
        return self._result[-len(self.flagged) :].ne(0).tolist()

    @torch.no_grad()
    def finish(self, is_used: dict[Gradient, bool]) -> None:
        """Make the averages the gradients; `is_used` says of those this rank lacks whether another rank has them."""
        assert self._result is not None, "a bucket is waited for before it is read"
        if self._is_packed and self._is_plain:
            torch._foreach_copy_(self._grads, torch._utils._unflatten_dense_tensors(self._result, self._grads))
        elif self._is_packed:
            sizes = [gradient.leaf.numel() for gradient in self.gradients]
            views = self._result[: sum(sizes)].split(sizes)
            for gradient, grad, view in zip(self.gradients, self._grads, views, strict=True):
                self._give(gradient, grad, view, is_used)
        self._grads, self._pending, self._result = [], None, None

    def _give(self, gradient: Gradient, grad: torch.Tensor | None, view: torch.Tensor, is_used: Any) -> None:
        leaf = gradient.leaf
        if grad is not None and not grad.requires_grad:
            grad.copy_(view.view(grad.shape))
        elif grad is not None or is_used[gradient]:
            leaf.grad = view.view(leaf.shape).to(leaf.dtype if grad is None else grad.dtype, copy=True)


def make_buckets(gradients: Iterable[Gradient], bucket_bytes: float) -> list[Bucket]:
    """Deal gradients to buckets, in the order in which all ranks send them: the last parameters first.

    Each kind fills buckets of its own. Gradients that no other rank has a copy of need none.
    """
    kinds: dict[Any, list[Gradient]] = {}
    open_: dict[Any, list[Gradient]] = {}
    sizes: dict[Any, int] = {}
    filled: list[list[Gradient]] = []
    for gradient in reversed([g for g in gradients if g.group.size > 1]):
        kind = gradient.kind
        kinds.setdefault(kind, []).append(gradient)
        open_.setdefault(kind, []).append(gradient)
        sizes[kind] = sizes.get(kind, 0) + gradient.leaf.numel() * gradient.dtype.itemsize
        if sizes[kind] >= (bucket_bytes if filled else min(FIRST_BUCKET_BYTES, bucket_bytes)):
            filled.append(open_.pop(kind))
            sizes[kind] = 0
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
