"""Optimizers over sharded parameters: `ShardedOptimizer`, state by name, gradient clipping."""

from shardtensor.optim import fqn as fqn
