"""The names of ``torch.distributed._shard.sharded_optim``."""

from shardtensor.parallel.parameter import named_params_with_sharded_tensor

from .api import ShardedOptimizer
