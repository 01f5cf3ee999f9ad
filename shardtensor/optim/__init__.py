"""Optimizers over sharded parameters: `ShardedOptimizer`, state by name, gradient clipping."""
