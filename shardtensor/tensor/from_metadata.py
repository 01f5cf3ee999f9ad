"""Make tensors from metadata that ranks need not compare: the metadata of torch's ShardedTensor, and of specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm.process_group import as_group, rank_of
from shardtensor.errors import LayoutError, RuleError
from shardtensor.layout.bind import bind, listed_layout, no_such_rank
from shardtensor.layout.box import Box, check_tensor, validate_non_overlapping_shards_metadata
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardMetadata,
    infer_sharding_spec,
)
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec
from shardtensor.spec.placement import Placement, parse_placement
from shardtensor.tensor.init_local import leaf_of
from shardtensor.tensor.placing import bind_named, mesh_of
from shardtensor.tensor.shard import Shard, ShardedTensorMetadata, TensorProperties
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


def check_metadata_of_all(metadata: ShardedTensorMetadata) -> None:
    if not metadata.shards_metadata:
        raise LayoutError("shards_metadata must not be empty!", fix="list every shard")
    if metadata.tensor_properties.layout != torch.strided:
        found = metadata.tensor_properties.layout
        raise LayoutError("Only torch.strided layout is currently supported", {"layout": found})


def from_local_shards_and_global_metadata(
    local_shards: list[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: Any = None,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """Return the tensor that the metadata describes; this rank passes its shards. Sends and compares nothing.
    Raises RuleError or LayoutError if the shards are not those of the metadata, or do not tile the size."""
    group = as_group(process_group)
    check_metadata_of_all(sharded_tensor_metadata)
    shards, shape = sharded_tensor_metadata.shards_metadata, tuple(sharded_tensor_metadata.size)
    owned = []
    for shard in shards:
        rank, _ = parse_and_validate_remote_device(process_group, shard.placement)
        owned.append((rank, Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))))
    own_boxes = [box for rank, box in owned if rank == group.rank]
    if len(local_shards) != len(own_boxes):
        raise RuleError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata "
            f"in sharded_tensor_metadata ({len(own_boxes)}) on rank ({group.rank})",
            fix="pass the shards that the metadata gives this rank",
        )
    _check_shards(local_shards, sharded_tensor_metadata.tensor_properties)
    spec = sharding_spec or infer_sharding_spec(shards)
    validate_non_overlapping_shards_metadata(shards)
    check_tensor(shards, shape)
    is_chunked = isinstance(spec, ChunkShardingSpec) and all(rank in group.ranks for rank, _ in owned)
    layout = bind_named(spec, shape, mesh_of(group)) if is_chunked else listed_layout(tuple(owned), shape)
    by_box = {box: shard.tensor for box, shard in zip(own_boxes, local_shards, strict=True)}
    dtype = sharded_tensor_metadata.tensor_properties.dtype
    return wrap(leaf_of(layout, group, by_box, dtype), layout, spec, group)


def _check_shards(local_shards: Sequence[Shard], properties: TensorProperties) -> None:
    for shard in local_shards:
        tensor = shard.tensor
        found = TensorProperties.create_from_tensor(tensor)
        for name in ("layout", "pin_memory", "dtype", "requires_grad"):
            expected, actual = getattr(properties, name), getattr(found, name)
            if expected != actual:
                raise LayoutError(
                    f"Local shards' tensor {name} property is incompatible with tensor property on this rank",
                    {"tensor property": expected, "local shard": actual, "shard": shard.metadata},
                )
            if name == "layout" and not tensor.is_contiguous():
                raise LayoutError(
                    "Only torch.contiguous_format memory_format is currently supported", fix="call contiguous() first"
                )


def build_metadata(
    spec: ChunkShardingSpec | GridShardingSpec | EnumerableShardingSpec,
    tensor_sizes: Sequence[int],
    tensor_properties: TensorProperties,
) -> ShardedTensorMetadata:
    """Return what ``metadata()`` returns for a tensor of this spec and global size, for any placements, on any process.

    A method of the specs that name devices. This module adds it, as `parallel` adds `shard_tensor`, because the
    modules of the specs do not import torch: planning runs where torch cannot be imported.
    """
    shape = tuple(tensor_sizes)
    if isinstance(spec, EnumerableShardingSpec):
        check_tensor(spec.shards, shape)
        return ShardedTensorMetadata(spec.shards, torch.Size(shape), tensor_properties)
    ranks = range(len(spec.placements))  # a placement may name no rank, and a rank may have several
    numbered = attrs.evolve(spec, placements=f"rank:0-{ranks[-1]}/cpu")
    layout = bind(numbered, shape, Mesh((("*", len(ranks)),)))
    boxes = [box for rank in ranks for box in layout.boxes(rank)]
    shards = [ShardMetadata(box.offsets, box.sizes, at) for box, at in zip(boxes, spec.placements, strict=True)]
    return ShardedTensorMetadata(shards, torch.Size(shape), tensor_properties)


for _kind in (ChunkShardingSpec, GridShardingSpec, EnumerableShardingSpec):
    _kind.build_metadata = build_metadata  # type: ignore[method-assign,assignment]


def parse_and_validate_remote_device(process_group: Any, remote_device: Any) -> tuple[int, torch.device]:
    """Return the global rank, which has to be in the process group, and the device of a placement."""
    if remote_device is None:
        raise LayoutError("remote device is None", fix='give the shard a placement such as "rank:0/cpu"')
    placement: Placement = parse_placement(remote_device)
    rank, group = rank_of(placement), as_group(process_group)
    if rank is None:
        raise LayoutError("a placement names no rank", {"placement": placement}, 'write it as in "rank:0/cpu"')
    if group.index >= 0 and rank not in group.ranks:
        raise no_such_rank(rank, mesh_of(group))
    return rank, placement.device()


def is_torch_sharded(x: Any) -> bool:
    """Return whether `x` is torch's ShardedTensor, without importing it."""
    return type(x).__name__ == "ShardedTensor" and type(x).__module__.startswith("torch.distributed._shard")


def from_torch_sharded_tensor(tensor: Any) -> ShardedTensor:
    """Convert torch's ShardedTensor to a `ShardedTensor` on the same process group. Sends nothing.

    A rank's only shard keeps its memory: a write into either is visible in the other. Several are copied.
    ``load_state_dict`` and ``copy_`` of sharded tensors accept torch's directly, whatever the two layouts are.

    Read a file with torch's ShardedTensors by ``torch.load(file, weights_only=False)``, after the process group was
    made: torch itself cannot read its classes with ``weights_only=True`` either.

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
    source = tensor.metadata()
    size, given = torch.Size(source.size), source.tensor_properties
    properties = TensorProperties(given.dtype, given.layout, given.requires_grad, pin_memory=given.pin_memory)
    metadata = ShardedTensorMetadata([_inside(md, size) for md in source.shards_metadata], size, properties)
    shards = [Shard(shard.tensor, _inside(shard.metadata, size)) for shard in tensor.local_shards()]
    spec = as_spec(tensor.sharding_spec())
    return from_local_shards_and_global_metadata(shards, metadata, tensor._process_group, sharding_spec=spec)


def _inside(shard: Any, size: torch.Size) -> ShardMetadata:
    """Return a shard's metadata; an empty shard, which torch may start past the end of a dim, starts at the end."""
    offsets = [min(offset, length) for offset, length in zip(shard.shard_offsets, size, strict=True)]
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)
