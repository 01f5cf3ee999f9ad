"""The names of ``torch.distributed._shard.sharding_plan.api``."""

from shardtensor.parallel.sharding_plan import ShardingPlan, ShardingPlanner
