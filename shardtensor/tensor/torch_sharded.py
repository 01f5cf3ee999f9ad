"""The border to ``torch.distributed._shard``: tensors that old code made, or that old files hold."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.spec.devices import ShardMetadata
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardtensor.tensor.ported import from_local_shards_and_global_metadata
from shardtensor.tensor.shard import Shard
from shardtensor.tensor.sharded_tensor import ShardedTensor


def is_torch_sharded(x: Any) -> bool:
    """Whether `x` is torch's ShardedTensor; does not import it."""
    return type(x).__name__ == "ShardedTensor" and type(x).__module__.startswith("torch.distributed._shard")


def from_torch_sharded_tensor(tensor: Any) -> ShardedTensor:
    """Return the `ShardedTensor` of torch's own one, on the same process group. Sends nothing.

    A rank's only shard keeps its memory: what is written into either is seen in the other. Several are copied.
    ``load_state_dict`` and ``copy_`` of sharded tensors take torch's by themselves, whatever the two layouts are.

    A file with torch's ShardedTensors is read by ``torch.load(file, weights_only=False)``, where the process group has
    been made: torch's classes cannot be read with ``weights_only=True``, by torch itself neither.

    Args:
        tensor: a ``torch.distributed._shard.sharded_tensor.ShardedTensor``; every rank of its group calls this.

    Raises:
        TypeError: it is another object.

    Example:
        >>> import shardtensor, torch.distributed as dist
        >>> from torch.distributed._shard import sharded_tensor
        >>> from torch.distributed._shard.sharding_spec import ChunkShardingSpec
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> theirs = sharded_tensor.empty(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 6)
        >>> shardtensor.from_torch_sharded_tensor(theirs).shape
        torch.Size([4, 6])
        >>> dist.destroy_process_group()
    """
    if not is_torch_sharded(tensor):
        raise TypeError(f"this takes torch's ShardedTensor, and this is a {type(tensor).__name__}")
    theirs = tensor.metadata()
    size, given = torch.Size(theirs.size), theirs.tensor_properties
    properties = TensorProperties(given.dtype, given.layout, given.requires_grad, pin_memory=given.pin_memory)
    metadata = ShardedTensorMetadata([_inside(md, size) for md in theirs.shards_metadata], size, properties)
    shards = [Shard(shard.tensor, _inside(shard.metadata, size)) for shard in tensor.local_shards()]
    spec = as_spec(tensor.sharding_spec())
    return from_local_shards_and_global_metadata(shards, metadata, tensor._process_group, sharding_spec=spec)


def _inside(shard: Any, size: torch.Size) -> ShardMetadata:
    """A shard's metadata; that of an empty one, which torch lets begin past the end of a dim, begins at the end."""
    offsets = [min(offset, length) for offset, length in zip(shard.shard_offsets, size, strict=True)]
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)
