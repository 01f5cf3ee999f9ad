"""The names of ``torch.distributed._shard.sharded_optim``."""

from shardtensor.optim.named_params import named_params_with_sharded_tensor

from .api import ShardedOptimizer
