"""Torch's operations on ShardedTensors. Importing this package registers them."""

from shardtensor.ops import pointwise as pointwise
