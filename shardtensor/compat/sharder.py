"""The names of ``torch.distributed._shard.sharder``."""

from shardtensor.parallel.sharding_plan import Sharder
