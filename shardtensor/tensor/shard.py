"""A shard, which is a box of a tensor with its data, and the metadata of all shards, under torch's names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from shardtensor.errors import LayoutError
from shardtensor.spec.devices import ShardMetadata, with_dataclass_fields
from shardtensor.spec.placement import Placement


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


@with_dataclass_fields()
@attrs.define
class ShardedTensorMetadata:
    """The shards of all ranks, the global size and the properties: a copy, free to change.

    Two that list the same shards in another order are equal.
    """

    shards_metadata: list[ShardMetadata] = attrs.field(
        factory=list,
        eq=lambda shards: sorted((list(s.shard_offsets), list(s.shard_sizes), str(s.placement)) for s in shards),
    )
    size: torch.Size = attrs.field(factory=lambda: torch.Size([]), converter=torch.Size)
    tensor_properties: TensorProperties = attrs.field(factory=TensorProperties)


if TYPE_CHECKING:
    from shardtensor.tensor.sharded_tensor import ShardedTensor


class Shard:
    """A local tensor and its position: ``tensor`` (its local shape) and ``metadata`` (offsets, sizes, placement).

    A shard made by the user holds its own tensor. One that `ShardedTensor.local_shards` returns refers to the tensor of
    its owner: setting ``tensor`` or ``metadata`` there changes the owner.

    Args:
        tensor: the data, of shape ``metadata.shard_sizes``.
        metadata: offsets, sizes and placement in the global tensor.

    Raises:
        LayoutError: (a ValueError) the shape or the device differs from the metadata.

    Example:
        >>> shard = Shard(torch.ones(2, 4), ShardMetadata([2, 0], [2, 4], "rank:1/cpu"))
        >>> shard.metadata.shard_offsets
        [2, 0]
    """

    __slots__ = ("_index", "_metadata", "_owner", "_tensor")

    def __init__(self, tensor: torch.Tensor, metadata: ShardMetadata) -> None:
        check_metadata(tensor, metadata)
        self._tensor: torch.Tensor | None = tensor
        self._metadata = metadata
        self._owner: ShardedTensor | None = None
        self._index = 0

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """Make the shard of a rank from its tensor and offsets; the placement is ``rank:<rank>/<tensor's device>``."""
        return cls(tensor, ShardMetadata(list(shard_offsets), list(tensor.size()), f"rank:{rank}/{tensor.device}"))

    @classmethod
    def of(cls, owner: ShardedTensor, index: int, metadata: ShardMetadata) -> Shard:
        """Return the shard that refers to box `index` of its owner's local tensor."""
        shard = cls.__new__(cls)
        shard._tensor, shard._metadata, shard._owner, shard._index = None, metadata, owner, index
        return shard

    @property
    def tensor(self) -> torch.Tensor:
        """The data, of local shape; for an owned shard the tensor on which autograd and optimizers work."""
        if self._owner is not None:
            return self._owner._shard_tensor(self._index)
        assert self._tensor is not None
        return self._tensor

    @tensor.setter
    def tensor(self, value: torch.Tensor) -> None:
        if self._owner is not None:
            self._owner._set_shard_tensor(self._index, value)
        else:
            self._tensor = value

    @property
    def metadata(self) -> ShardMetadata:
        return self._metadata

    @metadata.setter
    def metadata(self, value: ShardMetadata) -> None:
        if self._owner is not None:
            self._owner._set_shard_metadata(self._index, value)
        self._metadata = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        tensor = self.tensor
        copied = Shard.__new__(Shard)
        copied._tensor = memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))
        copied._metadata, copied._owner, copied._index = copy.deepcopy(self.metadata, memo), None, 0
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return (Shard, (self.tensor, self.metadata))

    def __repr__(self) -> str:
        return f"Shard(tensor={tuple(self.tensor.shape)} {self.tensor.dtype}, metadata={self.metadata})"


def check_metadata(tensor: torch.Tensor, metadata: ShardMetadata) -> None:
    """Raise LayoutError if the metadata has another size or device than the tensor."""
    if list(tensor.shape) != list(metadata.shard_sizes):
        raise LayoutError(
            "Shard tensor size does not match with metadata.shard_lengths!",
            {"tensor": by(tensor.shape), "metadata": by(metadata.shard_sizes)},
            "give the metadata the sizes of the tensor",
        )
    check_placement(tensor, metadata.placement, "the placement")


def check_placement(tensor: torch.Tensor, placement: Placement | None, named_in: str) -> None:
    """Raise LayoutError if the placement, which is `named_in` something, has another device than the tensor. A device
    without an index is any of its type."""
    if placement is None:
        return
    here, there = tensor.device, placement.device()
    if here.type != there.type or not (here.index is None or there.index is None or here.index == there.index):
        raise LayoutError(
            "Local shard tensor device does not match with local Shard's placement!",
            {"tensor": tensor.device, "placement": placement},
            f"move the tensor, or name its device in {named_in}",
        )


def by(shape: Sequence[int | None]) -> str:
    """Return a shape as messages print it: ``4 x 6``."""
    return " x ".join(map(str, shape)) or "scalar"
