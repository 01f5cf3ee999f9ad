"""The names of ``torch.distributed._shard.sharding_plan``."""

from .api import ShardingPlan, ShardingPlanner
