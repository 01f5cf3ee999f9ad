"""What a sharded tensor says about itself and its shards, under torch's names."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from shardtensor.spec.devices import ShardMetadata, with_dataclass_fields


@with_dataclass_fields()
@attrs.define
class TensorProperties:
    """dtype, layout and the like, equal on every rank."""

    dtype: torch.dtype = attrs.field(factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties of a tensor."""
        return TensorProperties(
            dtype=tensor.dtype, layout=tensor.layout, requires_grad=tensor.requires_grad, pin_memory=tensor.is_pinned()
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return (self.dtype, self.layout, self.requires_grad, str(self.memory_format), self.pin_memory)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, memory_format, self.pin_memory = state
        self.memory_format = getattr(torch, memory_format.removeprefix("torch."))


def _in_any_order(shards: list[ShardMetadata]) -> list[tuple[Any, ...]]:
    return sorted((list(s.shard_offsets), list(s.shard_sizes), str(s.placement)) for s in shards)


@with_dataclass_fields()
@attrs.define
class ShardedTensorMetadata:
    """The shards of all ranks, the global size and the properties: a copy, free to change.

    Two that list the same shards in another order are equal.
    """

    shards_metadata: list[ShardMetadata] = attrs.field(factory=list, eq=_in_any_order)
    size: torch.Size = attrs.field(factory=lambda: torch.Size([]), converter=torch.Size)
    tensor_properties: TensorProperties = attrs.field(factory=TensorProperties)
