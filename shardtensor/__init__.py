"""A library of sharded tensors with a one-line spec language."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtensor.imports import when_imported
from shardtensor.version import __version__

if TYPE_CHECKING:
    from shardtensor import checkpoint as checkpoint
    from shardtensor.compat import api as api
    from shardtensor.compat import metadata as metadata
    from shardtensor.compat import sharded_optim as sharded_optim
    from shardtensor.compat import sharded_tensor as sharded_tensor
    from shardtensor.compat import sharder as sharder
    from shardtensor.compat import sharding_plan as sharding_plan
    from shardtensor.compat import sharding_spec as sharding_spec

__path__.append(str(Path(__file__).parent / "compat"))  # shardtensor.sharded_tensor is compat/sharded_tensor

_HOME = {
    "AbsentRankError": "errors",
    "CPUOffloadPolicy": "fsdp.policy",
    "CallMismatchError": "errors",
    "CaptureError": "errors",
    "CheckpointError": "errors",
    "ChunkShardingSpec": "spec.devices",
    "Cut": "spec.nodes",
    "DevicePlacementSpec": "spec.devices",
    "DisagreementError": "errors",
    "EnumerableShardingSpec": "spec.devices",
    "ExpertList": "parallel.experts",
    "FSDPModule": "fsdp.module",
    "GatedExperts": "parallel.experts",
    "GatherWarning": "tensor.dispatch",
    "GridShardingSpec": "spec.devices",
    "LayoutError": "errors",
    "Mesh": "mesh",
    "MissingParameterError": "errors",
    "MixedPrecisionPolicy": "fsdp.policy",
    "MoE": "parallel.experts",
    "ModuleWrapPolicy": "fsdp.policy",
    "OffloadPolicy": "fsdp.policy",
    "ParallelCrossEntropy": "parallel.cross_entropy",
    "Placement": "spec.placement",
    "Plan": "plan.plan",
    "PlanError": "errors",
    "Replicate": "spec.nodes",
    "RuleError": "errors",
    "Shard": "tensor.shard",
    "ShardCountError": "errors",
    "ShardMetadata": "spec.devices",
    "ShardTensorError": "errors",
    "ShardedOptimizer": "optim.sharded_optimizer",
    "ShardedTensor": "tensor.sharded_tensor",
    "ShardedTensorMetadata": "tensor.shard",
    "Sharder": "parallel.sharding_plan",
    "ShardingPlan": "parallel.sharding_plan",
    "ShardingPlanner": "parallel.sharding_plan",
    "ShardingSpec": "spec.nodes",
    "Spec": "spec.nodes",
    "SpecError": "errors",
    "StaleParameterError": "errors",
    "TensorProperties": "tensor.shard",
    "UnshardHandle": "fsdp.module",
    "WrappedTwiceError": "errors",
    "ZeroRedundancyOptimizer": "optim.zero.optimizer",
    "along": "parallel.styles",
    "async_save": "checkpoint.saving",
    "check_collectives": "comm.checked",
    "check_numeric": "trace.check",
    "clip_grad_norm_": "optim.clip",
    "clip_grad_value_": "optim.clip",
    "colwise": "parallel.styles",
    "colwise_shared": "parallel.styles",
    "count_bytes": "sim.traffic",
    "custom_sharded_op_impl": "compat.custom_ops",
    "custom_sharding_spec_op": "compat.custom_ops",
    "data_parallel": "fsdp.data_parallel",
    "dispatch_tokens": "parallel.tokens",
    "distribute": "tensor.factories",
    "empty": "tensor.factories",
    "explain_reshard": "layout.explain",
    "fingerprint": "checkpoint.checksums",
    "from_dtensor": "tensor.dtensor",
    "from_torch_sharded_tensor": "tensor.from_metadata",
    "full": "tensor.factories",
    "full_state_dict": "tensor.state",
    "fully_shard": "fsdp.api",
    "graphed_step": "optim.graphs",
    "hook_with_zero_step": "optim.zero.ddp_hooks",
    "hook_with_zero_step_interleaved": "optim.zero.ddp_hooks",
    "init_from_local_shards": "tensor.init_local",
    "init_from_local_tensor": "tensor.init_local",
    "inspect": "checkpoint.inspecting",
    "latest": "checkpoint.folders",
    "load": "checkpoint.loading",
    "load_plan": "plan.loading",
    "load_with_process_group": "comm.process_group",
    "materialize": "parallel.materializing",
    "named_params_with_sharded_tensor": "optim.named_params",
    "no_sync": "fsdp.data_parallel",
    "ones": "tensor.factories",
    "optim_state_dict": "optim.fqn",
    "optim_state_dict_to_load": "optim.fqn",
    "parse_spec": "spec.parse",
    "placements_from_spec": "plan.interop.dtensor",
    "plan_from_hf": "plan.interop.hugging_face",
    "plan_text_from_hf": "plan.interop.hugging_face",
    "rand": "tensor.factories",
    "randn": "tensor.factories",
    "reduce_gradients": "fsdp.data_parallel",
    "register_fsdp_forward_method": "fsdp.module",
    "register_hook": "parallel.hooks",
    "register_op": "ops.register",
    "reshard": "tensor.reshard",
    "reshard_module": "checkpoint.live",
    "rowwise": "parallel.styles",
    "save": "checkpoint.saving",
    "shard_module": "parallel.shard_module",
    "shard_parameter": "parallel.parameter",
    "shard_tensor": "parallel.parameter",
    "share_comm_ctx": "fsdp.module",
    "simulate": "sim.simulate",
    "spec_from_placements": "plan.interop.dtensor",
    "strict": "tensor.dispatch",
    "unshard_module": "parallel.shard_module",
    "vocab_embedding": "parallel.styles",
    "vocab_head": "parallel.styles",
    "zeros": "tensor.factories",
}
"""The module of each public name. It is imported at the first use, so that planning does not import torch."""

_UPSTREAM = {
    "_broadcast_object": ("compat.broadcast_object", "broadcast_object"),
    "_collect_local_shard": ("parallel.parameter", "collect_local_shard"),
    "_reshard_output": ("parallel.parameter", "reshard_output"),
    "_shard_tensor": ("parallel.parameter", "shard_tensor"),
}
"""Names that torch's own code spells with an underscore."""

_MODULES = frozenset("api checkpoint metadata sharded_optim sharded_tensor sharder sharding_plan sharding_spec".split())
"""Submodules that are available without an import of their own, as in ``torch.distributed._shard``."""

_PURE = ("errors", "mesh", "plan", "spec")

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home, spelled = _UPSTREAM.get(name, (_HOME.get(name), name))
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not home.startswith(_PURE):
        if "torch" not in sys.modules:
            with warnings.catch_warnings():  # torch warns if numpy is not installed
                warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
                importlib.import_module("torch")
        importlib.import_module("shardtensor.ops")  # gives ShardedTensor its operations
    value = getattr(importlib.import_module(f"{__name__}.{home}"), spelled)
    globals()[name] = value
    return value


def _rebuild(*state: Any) -> Any:
    """Return the tensor of a pickle. Pickles name this function because it also loads the tensor's operations."""
    importlib.import_module("shardtensor.ops")
    return importlib.import_module("shardtensor.tensor.convert").rebuild(*state)


when_imported("torch.serialization", lambda module: module.add_safe_globals([_rebuild]))


def __dir__() -> list[str]:
    return list(__all__)
