"""The names of ``torch.distributed._shard.sharding_spec``."""

from shardtensor.spec.devices import GridShardingSpec, ShardMetadata

from ._internals import *
from .api import *
from .api import _infer_sharding_spec_from_shards_metadata
from .chunk_sharding_spec import ChunkShardingSpec
