"""Modules whose parameters are sharded: `shard_parameter`."""
