"""The names of ``torch.distributed._shard.sharding_spec``, its ``api`` and ``_internals``; nothing lives here."""

import shardtensor.ops  # gives ShardedTensor its operations
import shardtensor.parallel.parameter  # noqa: F401  (gives specs build_metadata and shard)
from shardtensor.layout.chunks import get_chunk_sharding_params, get_chunked_dim_size, get_split_size
from shardtensor.layout.tiling import check_tensor, validate_non_overlapping_shards_metadata
from shardtensor.spec.devices import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    PlacementSpec,
    ShardMetadata,
)
from shardtensor.spec.infer import infer_sharding_spec as _infer_sharding_spec_from_shards_metadata
from shardtensor.spec.nodes import ShardingSpec

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "GridShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
    "check_tensor",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]
