"""Whole modules sharded by rules: `shard_module`, `unshard_module`, torch's `ShardingPlan`."""
