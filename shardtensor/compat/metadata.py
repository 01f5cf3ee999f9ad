"""The names of ``torch.distributed._shard.metadata``."""

from shardtensor.spec.devices import ShardMetadata
