"""The names of ``torch.distributed._shard.sharding_spec.api``."""

import shardtensor.ops  # gives ShardedTensor its operations
import shardtensor.parallel.parameter  # gives specs build_metadata and shard
from shardtensor.compat.custom_ops import custom_sharding_spec_op
from shardtensor.spec.devices import DevicePlacementSpec, EnumerableShardingSpec, PlacementSpec
from shardtensor.spec.devices import infer_sharding_spec as _infer_sharding_spec_from_shards_metadata
from shardtensor.spec.nodes import ShardingSpec
