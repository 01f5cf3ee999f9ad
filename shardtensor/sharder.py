"""The name of ``torch.distributed._shard.sharder``; nothing lives here."""

from shardtensor.sharding.plan import Sharder

__all__ = ["Sharder"]
