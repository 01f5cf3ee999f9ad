"""`fully_shard`: parameters that are sharded over data ranks and gathered just before use; and `data_parallel`."""

import shardtensor.ops  # noqa: F401  (gives ShardedTensor its operations)
from shardtensor.fsdp.api import fully_shard
from shardtensor.fsdp.lifecycle import free_gathered
from shardtensor.fsdp.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardtensor.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, ModuleWrapPolicy, OffloadPolicy
from shardtensor.fsdp.summary import fsdp_summary

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "free_gathered",
    "fsdp_summary",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
