"""Optimizers of sharded parameters: `ShardedOptimizer`, state by parameter name, gradient clipping."""

from shardtensor.optim import fqn as fqn
