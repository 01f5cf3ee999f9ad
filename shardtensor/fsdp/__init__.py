"""`fully_shard`: parameters that lie in shards and are gathered just in time."""

from shardtensor import ops as ops  # gives ShardedTensor its operations
from shardtensor.fsdp.api import fully_shard
from shardtensor.fsdp.fsdp_module import FSDPModule
from shardtensor.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, ModuleWrapPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "fully_shard",
]
