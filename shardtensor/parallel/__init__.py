"""Modules whose parameters are sharded: `shard_parameter`, `shard_module`, parallel layers."""
