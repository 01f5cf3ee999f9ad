"""The names of ``torch.distributed._shard.sharded_optim``; nothing lives here."""

import shardtensor.ops  # noqa: F401  (gives ShardedTensor its operations)
from shardtensor.optim.named_params import named_params_with_sharded_tensor
from shardtensor.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer", "named_params_with_sharded_tensor"]
