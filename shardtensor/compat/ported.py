"""Functions for code written for torch's ShardedTensor: class methods that take shards, and state dict hooks."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardtensor.compat.rrefs import with_rrefs
from shardtensor.layout.box import check_tensor, validate_non_overlapping_shards_metadata
from shardtensor.spec.devices import infer_sharding_spec
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.factories import as_shape
from shardtensor.tensor.from_metadata import check_metadata_of_all, from_local_shards_and_global_metadata
from shardtensor.tensor.init_local import init_from_local_shards, init_from_local_tensor
from shardtensor.tensor.shard import Shard, ShardedTensorMetadata, TensorProperties
from shardtensor.tensor.sharded_tensor import ShardedTensor


class ShardedTensorBase(abc.ABC):  # noqa: B024  (for isinstance, of ShardedTensors too)
    """Shards and their metadata, in one process, without a process group or any operation."""

    def __init__(
        self,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> None:
        """Compute the metadata of a spec, which must name devices; there are no shards yet."""
        properties = TensorProperties(dtype or torch.get_default_dtype(), layout, requires_grad, pin_memory=pin_memory)
        self._sharding_spec = as_spec(sharding_spec)
        self._metadata = self._sharding_spec.build_metadata(as_shape(size), properties)
        self._local_shards: list[Shard] = []

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensorBase:
        """Return a base that holds shards of any ranks. The shards of the metadata must tile its size."""
        shards = sharded_tensor_metadata.shards_metadata
        check_metadata_of_all(sharded_tensor_metadata)
        validate_non_overlapping_shards_metadata(shards)
        check_tensor(shards, sharded_tensor_metadata.size)
        base = cls.__new__(cls)
        base._local_shards, base._metadata = local_shards, sharded_tensor_metadata
        base._sharding_spec = sharding_spec or infer_sharding_spec(shards)
        return base

    def local_shards(self) -> list[Shard]:
        """Return the shards."""
        return self._local_shards

    def metadata(self) -> ShardedTensorMetadata:
        """Return all shards' metadata, the global size and the properties."""
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        """Return the spec of the shards."""
        return self._sharding_spec

    def size(self) -> torch.Size:
        """Return the global size."""
        return self._metadata.size


ShardedTensorBase.register(ShardedTensor)
ShardedTensor._init_from_local_shards = staticmethod(with_rrefs(init_from_local_shards))  # type: ignore[attr-defined]
ShardedTensor._init_from_local_tensor = staticmethod(with_rrefs(init_from_local_tensor))  # type: ignore[attr-defined]
ShardedTensor._init_from_local_shards_and_global_metadata = staticmethod(  # type: ignore[attr-defined]
    with_rrefs(from_local_shards_and_global_metadata)
)
ShardedTensor._metadata = property(ShardedTensor.metadata)  # type: ignore[attr-defined]


def create_tensor_from_params(*size: Any, local_device: Any, tensor_properties: TensorProperties) -> torch.Tensor:
    """Return an uninitialized plain tensor of these properties on a device."""
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return torch.empty(
        *shape,
        dtype=tensor_properties.dtype,
        layout=tensor_properties.layout,
        device=local_device,
        requires_grad=tensor_properties.requires_grad,
        memory_format=tensor_properties.memory_format,
        pin_memory=tensor_properties.pin_memory,
    )


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put ShardedTensors that are plain attributes of a module into its ``state_dict``. Registered with
    ``module._register_state_dict_hook``; parameters and buffers need no hook."""
    for key, owner, name in _attributes(module, prefix):
        value = vars(owner)[name]
        if isinstance(value, ShardedTensor):
            destination[key] = value


def pre_load_state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Set plain attributes of a module from the ShardedTensors of a ``state_dict``. Registered with
    ``module._register_load_state_dict_pre_hook(hook, True)``."""
    for key, owner, name in _attributes(module, prefix):
        value = state_dict.get(key)
        if isinstance(value, ShardedTensor):
            setattr(owner, name, value)


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for name in list(vars(owner)):
            place = f"{prefix}{path}."
            yield f"{'' if place == '.' else place}{name}", owner, name
