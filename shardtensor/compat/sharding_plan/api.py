"""The names of ``torch.distributed._shard.sharding_plan.api``."""

from shardtensor.sharding.plan import ShardingPlan, ShardingPlanner
