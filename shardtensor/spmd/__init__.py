"""Data parallelism for whole train steps: `compile` and `DataParallel`."""

from shardtensor.spmd.api import compile
from shardtensor.spmd.parallel_mode import DataParallel

__all__ = ["DataParallel", "compile"]
