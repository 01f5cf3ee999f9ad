"""Whole train steps for data-parallel ranks: `compile`, `DataParallel`, `explain`."""

from shardtensor.spmd.api import compile, explain
from shardtensor.spmd.parallel_mode import DataParallel

__all__ = ["DataParallel", "compile", "explain"]
