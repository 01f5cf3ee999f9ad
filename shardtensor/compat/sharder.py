"""The names of ``torch.distributed._shard.sharder``."""

from shardtensor.sharding.plan import Sharder
