"""The names of ``torch.distributed._shard.sharding_spec.chunk_sharding_spec``."""

import shardtensor.parallel.parameter  # gives specs build_metadata and shard
from shardtensor.spec.devices import ChunkShardingSpec
