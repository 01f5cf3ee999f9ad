"""What code written for torch's own ShardedTensor calls: class methods that take shards, and state dict hooks.

They do as torch's do; `init_from_local_shards` and `init_from_local_tensor` are the functions behind most of them.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.process_group import as_group
from shardtensor.comm.workers import rank_of
from shardtensor.errors import LayoutError, RuleError
from shardtensor.layout.bind import bind, no_such_rank
from shardtensor.layout.box import Box
from shardtensor.layout.listed import listed_layout
from shardtensor.layout.tiling import check_tensor, validate_non_overlapping_shards_metadata
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardMetadata,
    infer_sharding_spec,
)
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec
from shardtensor.spec.placement import Placement, parse_placement
from shardtensor.tensor.binding import bind_named
from shardtensor.tensor.factories import as_shape, empty
from shardtensor.tensor.init_local import init_from_local_shards, init_from_local_tensor, leaf_of
from shardtensor.tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.remote import share
from shardtensor.tensor.shard import Shard
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


class ShardedTensorBase(abc.ABC):  # noqa: B024  (for isinstance, of ShardedTensors too)
    """Shards and what they are shards of, in one process, without a process group or any operation.

    Example:
        >>> from shardtensor.spec.devices import ShardMetadata
        >>> shard = Shard(torch.ones(4), ShardMetadata([0], [4], "rank:0/cpu"))
        >>> metadata = ShardedTensorMetadata([shard.metadata], torch.Size([4]))
        >>> base = ShardedTensorBase._init_from_local_shards_and_global_metadata([shard], metadata)
        >>> base.size(), len(base.local_shards())
        (torch.Size([4]), 1)
    """

    def __init__(
        self,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> None:
        """Say where the shards of a spec lie, and hold none yet; the spec is one that names devices."""
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
        """Take the shards of any ranks. The metadata must tile its size."""
        shards = sharded_tensor_metadata.shards_metadata
        _check_metadata(sharded_tensor_metadata)
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
        """Return the spec that the metadata says."""
        return self._sharding_spec

    def size(self) -> torch.Size:
        """Return the global size."""
        return self._metadata.size


def _check_metadata(metadata: ShardedTensorMetadata) -> None:
    if not metadata.shards_metadata:
        raise LayoutError("shards_metadata must not be empty!", fix="list every shard")
    if metadata.tensor_properties.layout != torch.strided:
        found = metadata.tensor_properties.layout
        raise LayoutError("Only torch.strided layout is currently supported", {"layout": found})


def from_local_shards_and_global_metadata(
    local_shards: list[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: Any = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """Return the tensor that the metadata describes, of which this rank has these shards.

    Sends nothing (but RRefs with `init_rrefs`) and compares nothing between ranks: the metadata is trusted to be right
    on each of them.

    Raises:
        RuntimeError: not as many shards as the metadata gives this rank.
        LayoutError: (a ValueError) a shard that is not what the metadata says, shards that do not tile the size.
    """
    group = as_group(process_group)
    _check_metadata(sharded_tensor_metadata)
    shards, shape = sharded_tensor_metadata.shards_metadata, tuple(sharded_tensor_metadata.size)
    owned = []
    for shard in shards:
        rank, _ = parse_and_validate_remote_device(process_group, shard.placement)
        owned.append((rank, Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))))
    mine = [box for rank, box in owned if rank == group.rank]
    if len(local_shards) != len(mine):
        raise RuleError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata "
            f"in sharded_tensor_metadata ({len(mine)}) on rank ({group.rank})",
            fix="pass the shards that the metadata gives this rank",
        )
    _check_shards(local_shards, sharded_tensor_metadata.tensor_properties)
    spec = sharding_spec or infer_sharding_spec(shards)
    validate_non_overlapping_shards_metadata(shards)
    check_tensor(shards, shape)
    is_chunked = isinstance(spec, ChunkShardingSpec) and all(rank in group.ranks for rank, _ in owned)
    layout = bind_named(spec, shape, mesh_of(group)) if is_chunked else listed_layout(tuple(owned), shape)
    by_box = {box: shard.tensor for box, shard in zip(mine, local_shards, strict=True)}
    dtype = sharded_tensor_metadata.tensor_properties.dtype
    tensor = wrap(leaf_of(layout, group, by_box, dtype), layout, spec, group)
    return share(tensor) if init_rrefs else tensor


def _check_shards(local_shards: Sequence[Shard], properties: TensorProperties) -> None:
    for shard in local_shards:
        tensor = shard.tensor
        found = TensorProperties.create_from_tensor(tensor)
        for name in ("layout", "pin_memory", "dtype", "requires_grad"):
            want, has = getattr(properties, name), getattr(found, name)
            if want != has:
                raise LayoutError(
                    f"Local shards' tensor {name} property is incompatible with tensor property on this rank",
                    {"tensor property": want, "local shard": has, "shard": shard.metadata},
                )
            if name == "layout" and not tensor.is_contiguous():
                raise LayoutError(
                    "Only torch.contiguous_format memory_format is currently supported", fix="call contiguous() first"
                )


def _new(cls: type[ShardedTensor], sharding_spec: ShardingSpec | str, *size: Any, **options: Any) -> ShardedTensor:
    """``ShardedTensor(spec, 4, 6, dtype=..., process_group=...)``, which is `empty`."""
    return empty(sharding_spec, *size, **options)


ShardedTensorBase.register(ShardedTensor)
ShardedTensor.__new__ = _new  # type: ignore[method-assign,assignment]
ShardedTensor._init_from_local_shards = staticmethod(init_from_local_shards)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_tensor = staticmethod(init_from_local_tensor)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_shards_and_global_metadata = staticmethod(  # type: ignore[attr-defined]
    from_local_shards_and_global_metadata
)


def build_metadata(
    spec: ChunkShardingSpec | GridShardingSpec | EnumerableShardingSpec,
    tensor_sizes: Sequence[int],
    tensor_properties: TensorProperties,
) -> ShardedTensorMetadata:
    """Return what ``metadata()`` of a tensor of this spec and global size says, for any placements, on any process.

    A method of the specs that name devices. It is given to them here, as `shard_tensor` is in `parallel`, because specs
    know no tensors: planning runs where torch cannot be imported.

    Raises:
        LayoutError: (a ValueError) the spec does not fit the size.

    Example:
        >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> spec.build_metadata([3, 4], TensorProperties()).shards_metadata[1]
        ShardMetadata(shard_offsets=[2, 0], shard_sizes=[1, 4], placement=rank:1/cpu)
    """
    shape = tuple(tensor_sizes)
    if isinstance(spec, EnumerableShardingSpec):
        check_tensor(spec.shards, shape)
        return ShardedTensorMetadata(spec.shards, torch.Size(shape), tensor_properties)
    ranks = range(len(spec.placements))  # a placement may name no rank, and a rank may have several
    numbered = attrs.evolve(spec, placements=f"rank:0-{ranks[-1]}/cpu")
    layout = bind(numbered, shape, Mesh((("*", len(ranks)),)))
    boxes = [box for rank in ranks for box in layout.boxes(rank)]
    shards = [ShardMetadata(box.offsets, box.sizes, at) for box, at in zip(boxes, spec.placements, strict=True)]
    return ShardedTensorMetadata(shards, torch.Size(shape), tensor_properties)


for _kind in (ChunkShardingSpec, GridShardingSpec, EnumerableShardingSpec):
    _kind.build_metadata = build_metadata  # type: ignore[method-assign,assignment]


def parse_and_validate_remote_device(process_group: Any, remote_device: Any) -> tuple[int, torch.device]:
    """Return the global rank and the device of a placement.

    Raises:
        LayoutError: (a ValueError) there is none, it names no rank, or one outside the process group.
        RuleError: (a RuntimeError) it names a worker, and RPC is not initialized.
    """
    if remote_device is None:
        raise LayoutError("remote device is None", fix='give the shard a placement such as "rank:0/cpu"')
    placement: Placement = parse_placement(remote_device)
    rank, group = rank_of(placement), as_group(process_group)
    if rank is None:
        raise LayoutError("a placement names no rank", {"placement": placement}, 'write it as in "rank:0/cpu"')
    if group.index >= 0 and rank not in group.ranks:
        raise no_such_rank(rank, mesh_of(group))
    return rank, placement.device()


def create_tensor_from_params(*size: Any, local_device: Any, tensor_properties: TensorProperties) -> torch.Tensor:
    """Return an unset plain tensor of these properties on a device."""
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
    """Put ShardedTensors that are plain attributes of a module into its ``state_dict``.

    Registered with ``module._register_state_dict_hook``; parameters and buffers need no hook.
    """
    for key, owner, name in _attributes(module, prefix):
        value = vars(owner)[name]
        if isinstance(value, ShardedTensor):
            destination[key] = value


def pre_load_state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Set plain attributes of a module from the ShardedTensors of a ``state_dict``.

    Registered with ``module._register_load_state_dict_pre_hook(hook, True)``.
    """
    for key, owner, name in _attributes(module, prefix):
        value = state_dict.get(key)
        if isinstance(value, ShardedTensor):
            setattr(owner, name, value)


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for name in list(vars(owner)):
            place = f"{prefix}{path}."
            yield f"{'' if place == '.' else place}{name}", owner, name
