"""`DataParallel`: how a compiled train step is spread over ranks."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs.validators import ge, in_, instance_of


@attrs.frozen
class DataParallel:
    """Each rank computes its part of the batch; parameters are replicated, or sharded and gathered before use.

    Args:
        parallel_style: ``"replicate"``: gradients are all-reduced. ``"fully_shard"``: each rank stores and steps a
            shard of parameters and optimizer state; parameters are all-gathered, gradients reduce-scattered.
        input_batch_dim: the dim of the batch's tensors that has the samples.
        reduce_op: what becomes of the gradient of a loss that is a *sum* over samples. ``"mean"``: it is divided by the
            number of ranks, as in torch's DistributedDataParallel. ``"sum"``: it is the gradient of the sum over all
            samples. The gradient of a mean is in both cases the one of the mean over all samples.
        mesh: the data ranks, as `fully_shard` takes them; None for the default group.
        bucket_mib: gradients are all-reduced in buckets of this size, as by `data_parallel`.
        keep_mib: the last fully sharded units stay gathered from forward to backward, as many as need no more memory
            than this together. The others are gathered again for backward, unless their `fully_shard` has
            ``reshard_after_forward=False``.
        seed: seeds each rank's random numbers with a number of its own, derived from this one, at the first call; None
            leaves the generators as they are.

    Example:
        >>> DataParallel("replicate").input_batch_dim
        0
    """

    parallel_style: Literal["replicate", "fully_shard"] = attrs.field(
        default="replicate", validator=in_(("replicate", "fully_shard"))
    )
    input_batch_dim: int = attrs.field(default=0, kw_only=True, validator=[instance_of(int), ge(0)])
    reduce_op: Literal["mean", "sum"] = attrs.field(default="mean", kw_only=True, validator=in_(("mean", "sum")))
    mesh: Any = attrs.field(default=None, kw_only=True)
    bucket_mib: float = attrs.field(default=25.0, kw_only=True)
    keep_mib: float = attrs.field(default=64.0, kw_only=True, validator=ge(0))
    seed: int | None = attrs.field(default=None, kw_only=True)
