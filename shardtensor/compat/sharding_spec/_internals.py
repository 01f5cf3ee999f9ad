"""The names of ``torch.distributed._shard.sharding_spec._internals``."""

from shardtensor.layout.tiling import (
    check_tensor,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    validate_non_overlapping_shards_metadata,
)
