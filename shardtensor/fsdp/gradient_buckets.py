"""Gradients of parameters, in buckets of those that are averaged over the same ranks: each is one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, RuleError
from shardtensor.fsdp.data_mesh import DataAxes
from shardtensor.layout.ranges import ANYWHERE, lay_out_whole
from shardtensor.tensor.bucket import Bucket, GradientBuffer, allocate, free
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


@attrs.frozen(eq=False)
class Gradient:
    """The gradient of a parameter, and the ranks that it is averaged with.

    Attributes:
        name: of the parameter.
        param: the user's tensor, a ShardedTensor or a plain one.
        leaf: its local tensor, whose ``grad`` autograd sets.
        group: the ranks that hold replicas of `leaf`.
        share: their share of all data ranks.
        dtype: in which it is sent, which is the one that autograd will give it.
    """

    name: str
    param: torch.Tensor
    leaf: torch.Tensor
    group: Group
    share: float
    dtype: torch.dtype

    @property
    def kind(self) -> tuple[Any, ...]:
        """Gradients of one kind can share a bucket."""
        return id(self.group), self.dtype, self.leaf.device


def named_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield parameters, and sharded leaves that are plain attributes, with the module that holds them."""
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, param in owner._parameters.items():
            if param is not None:
                yield prefix + name, owner, param
        for name, value in vars(owner).items():
            if isinstance(value, ShardedTensor) and value._local.requires_grad and value._local.is_leaf:
                yield prefix + name, owner, value


def gradients_of(named: Iterable[tuple[str, Any, torch.Tensor]], axes: DataAxes) -> list[Gradient]:
    """Return the gradients that backward can compute, each leaf once; `named` as in `named_tensors`."""
    found: dict[int, Gradient] = {}
    for name, owner, param in named:
        leaf = local_of(param)
        if id(leaf) in found or not (leaf.requires_grad and leaf.is_leaf):
            continue
        if getattr(owner, "sparse", False) is True:
            raise _sparse_error(name)
        group, share = axes.copies(name, param)
        if share != 1.0 and owner is not None and type(owner).forward.__module__.startswith("torch.nn."):
            raise LayoutError(
                f"`{name}` is cut along a data axis, but {type(owner).__name__} takes its input as equal on all ranks",
                {"spec": str(param.sharding_spec()), "data axes": ", ".join(axes.names)},  # type: ignore[attr-defined]
                "shard it along other axes; a layer that sends its inputs to the ranks may cut along a data axis",
            )
        dtype = getattr(leaf, "grad_dtype", leaf.dtype) or torch.promote_types(leaf.dtype, torch.float32)
        found[id(leaf)] = Gradient(name, param, leaf, group, share, dtype)
    return list(found.values())


def _sparse_error(name: str) -> RuleError:
    return RuleError(
        f"the gradient of `{name}` is sparse, and sparse gradients are not averaged",
        fix="make the embedding with sparse=False",
    )


FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that communication starts early."""


class GradientBucket:
    """Gradients of one kind that are sent together.

    They stay where autograd puts them: `start` copies them into a flat buffer, and `finish` copies the averages back.
    A gradient that no rank has stays None, as in the dense program; one that only other ranks have is set on this rank
    as well. So the last bucket of a kind ends with one flag for each gradient of the kind: whether this rank has it. A
    rank reads the flags only if it lacks a gradient.

    Attributes:
        gradients: in the order they are packed.
        flagged: the gradients of the whole kind in the kind's last bucket, else none.
        waiting: how many of them backward has not computed yet.
        pending: the all-reduce, once it is started.
    """

    def __init__(self, gradients: Sequence[Gradient], flagged: Sequence[Gradient] = ()) -> None:
        self.gradients, self.flagged = gradients, flagged
        shapes = [tuple(gradient.leaf.shape) for gradient in gradients] + [(len(flagged),)]
        ranges = lay_out_whole([math.prod(shape) for shape in shapes])
        self._bucket = Bucket([ANYWHERE] * len(shapes), shapes, ranges, index=0)
        self._buffer: GradientBuffer | None = None
        self.reset()

    def reset(self) -> None:
        """Drop the sent gradients, and wait for all gradients again."""
        self.waiting = len(self.gradients)
        self.pending: Any = None
        self.grads: list[Any] = []

    @torch.no_grad()
    def start(self) -> None:
        """Start the all-reduce of the gradients, zeros for missing ones. All ranks start buckets in the same order."""
        self.grads = [gradient.leaf.grad for gradient in self.gradients]
        for gradient, grad in zip(self.gradients, self.grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise _sparse_error(gradient.name)
        first = self.gradients[0]
        has = [gradient.leaf.grad is not None for gradient in self.flagged]
        kind: dict[str, Any] = {"dtype": first.dtype, "device": first.leaf.device}
        flags = torch.ones(len(has), **kind) if all(has) else torch.tensor(has, **kind)  # the host waits for a list
        if self._buffer is None:
            self._buffer = self._bucket.gradient_buffer(torch.empty(self._bucket.total, **kind))
        allocate(self._buffer.packed)
        self._buffer.pack([*self.grads, flags])
        self.pending = first.group.all_reduce_async(self._buffer.packed, "avg")

    @torch.no_grad()
    def finish(self, is_used: dict[Gradient, bool]) -> None:
        """Set the averages as gradients; `is_used` is whether another rank has a gradient that this rank lacks."""
        assert self._buffer is not None, "it was started"
        *views, _ = self._buffer.params
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for gradient, grad, view in zip(self.gradients, self.grads, views, strict=True):
            if grad is not None and not grad.requires_grad:
                kept.append((grad, view))
            elif grad is not None or is_used[gradient]:
                leaf = gradient.leaf
                leaf.grad = view.to(leaf.dtype if grad is None else grad.dtype, copy=True)
        if kept:
            torch._foreach_copy_([grad for grad, _ in kept], [view for _, view in kept])
        free(self._buffer.packed)

    def flags(self) -> dict[Gradient, bool]:
        """Return for each flagged gradient whether any rank has it. The host waits."""
        assert self._buffer is not None, "it was started"
        return dict(zip(self.flagged, self._buffer.params[-1].ne(0).tolist(), strict=True))


def make_buckets(gradients: Iterable[Gradient], bucket_bytes: float) -> list[GradientBucket]:
    """Assign gradients to buckets, in the order in which all ranks send them: the last parameters first.

    Each kind has its own buckets. Gradients without a replica on another rank need none.
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
        GradientBucket(each, kinds[each[0].kind] if last[each[0].kind] == i else ()) for i, each in enumerate(filled)
    ]


def finish(buckets: Sequence[GradientBucket]) -> None:
    """Wait for buckets that were all started, and set the averages as gradients."""
    for bucket in buckets:
        bucket.pending.wait()
    lacking = {b.gradients[0].kind for b in buckets if any(grad is None for grad in b.grads)}
    is_used: dict[Gradient, bool] = {}
    for bucket in buckets:
        if bucket.flagged and bucket.gradients[0].kind in lacking:
            is_used.update(bucket.flags())
    for bucket in buckets:
        bucket.finish(is_used)
