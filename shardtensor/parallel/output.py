"""Hooks with torch's names: they redistribute a module's result, or return this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardtensor.spec.devices import ChunkShardingSpec
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.sharded_tensor import ShardedTensor

Hook = Callable[[nn.Module, Any, Any], Any]


def reshard_output(module: nn.Module, spec: ShardingSpec | str) -> nn.Module:
    """Redistribute the ShardedTensor that `module` returns to `spec`; return the module.

    Other results pass as they are. All ranks that call the module take part in the reshard.

    Example:
        >>> import torch, shardtensor as st
        >>> double = reshard_output(nn.Identity(), "[-, tp]")
        >>> str(double(st.distribute(torch.ones(2, 2), "[tp, -]")).sharding_spec())
        '[-, tp]'
    """
    module.register_forward_hook(resharding(as_spec(spec)))
    return module


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Replace the ShardedTensor that `module` returns by this rank's part, a plain tensor; return the module.

    A chunk of one row has no dim left for the rows, as if the rank had picked its row.
    """
    module.register_forward_hook(collecting)
    return module


def resharding(spec: ShardingSpec) -> Hook:
    """The hook of `reshard_output`."""
    return partial(_resharded, spec)


def _resharded(spec: ShardingSpec, module: nn.Module, args: Any, output: Any) -> Any:
    return output.reshard(spec) if isinstance(output, ShardedTensor) else output


def collecting(module: nn.Module, args: Any, output: Any) -> torch.Tensor | Any:
    """The hook of `collect_local_shard`."""
    if not isinstance(output, ShardedTensor):
        return output
    local, spec = output.local_tensor(), output.sharding_spec()
    is_row = isinstance(spec, ChunkShardingSpec) and local.shape[spec.dim] == 1
    return local.squeeze(spec.dim) if is_row else local  # type: ignore[attr-defined]
