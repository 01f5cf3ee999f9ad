"""The names of ``torch.distributed._shard.sharding_spec``."""

from shardtensor.spec.devices import GridShardingSpec, ShardMetadata

from ._internals import (
    check_tensor,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    validate_non_overlapping_shards_metadata,
)
from .api import (
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    _infer_sharding_spec_from_shards_metadata,
)
from .chunk_sharding_spec import ChunkShardingSpec
