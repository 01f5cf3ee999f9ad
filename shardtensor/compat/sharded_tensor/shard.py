"""The names of ``torch.distributed._shard.sharded_tensor.shard``."""

from shardtensor.tensor.shard import Shard
