"""The names of ``torch.distributed._shard.sharded_optim.api``."""

import shardtensor.ops  # noqa: F401  (gives ShardedTensor its operations)
from shardtensor.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
