"""The names of ``torch.distributed._shard.sharded_optim.api``."""

import shardtensor.ops  # gives ShardedTensor its operations
from shardtensor.optim.sharded_optimizer import ShardedOptimizer
