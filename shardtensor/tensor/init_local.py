"""Sharded tensors from what ranks already hold: `init_from_local_shards`, `init_from_local_tensor`.

Ranks can disagree here. So each rank sends the errors of its own part in one small exchange before anything is made,
and every rank raises the same error; the contents of tensors are never sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, combinations, product
from operator import index
from typing import Any

import attrs
import torch

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group, rank_of
from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.layout.bind import listed_layout
from shardtensor.layout.box import Box, check_tiling
from shardtensor.layout.layout import Layout
from shardtensor.spec.devices import EnumerableShardingSpec, ShardMetadata
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.placing import bind_named, mesh_of, own_device, placement_of
from shardtensor.tensor.shard import Shard, TensorProperties, by, check_metadata, same_device
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

PROPERTIES = ("dtype", "requires_grad", "pin_memory")
Size = tuple[int | None, ...]
Shape = tuple[int, ...]


@attrs.frozen
class RankShards:
    """What one rank passes, as small values to exchange; the properties are None if it has no shard."""

    size: Size
    shards: tuple[tuple[Shape, Shape, str], ...]
    dtype: torch.dtype | None
    requires_grad: bool | None
    pin_memory: bool | None


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: Any = None
) -> ShardedTensor:
    """Return the sharded tensor that the ranks' shards make up. All ranks of the group call it: metadata is exchanged.

    A rank's single shard becomes the tensor's leaf as it is, without a copy; several are packed into a new one. The
    metadata is copied, so that the caller's objects may change afterwards.

    Args:
        local_shards: this rank's shards, perhaps none; placements have global ranks.
        global_size: the global shape. If one dim is None, the shards are concatenated along it, in rank order; if the
            whole shape is None, along dim 0. Their offsets are then computed again.
        process_group: a process group, a DeviceMesh, or None for the default group.

    Raises:
        LayoutError: (a ValueError) the same on every rank: no size, gaps, overlaps, properties that differ.

    Example:
        >>> piece = Shard(torch.ones(4), ShardMetadata([0], [4], "rank:0/cpu"))
        >>> init_from_local_shards([piece], 4).full_tensor()
        tensor([1., 1., 1., 1.])
    """
    group = as_group(process_group)
    own, fault = _caught(lambda: _checked_shards(local_shards, global_size, group.rank))
    agree(group, "init_from_local_shards", {}, fault)
    holders = {
        rank: other for rank, other in zip(group.ranks, group.exchange_objects(own), strict=True) if other.shards
    }
    _check_properties(holders)
    shape, shards = _joined(holders)
    check_tiling([(rank, _box(shard)) for rank, shard in shards], shape)
    spec = EnumerableShardingSpec([shard for _, shard in shards])
    held = [(rank_of(box.placement), Box(box.offsets, box.sizes)) for box in spec.boxes if box.placement is not None]
    layout = listed_layout(tuple((rank, box) for rank, box in held if rank is not None), shape)
    own_boxes = [_box(shard) for rank, shard in shards if rank == group.rank]
    first = next(iter(holders.values()))
    leaf = leaf_of(
        layout,
        group,
        {box: shard.tensor for box, shard in zip(own_boxes, local_shards, strict=True)},
        first.dtype,
        device=own_device(shards[0][1].placement.device_type),  # type: ignore[union-attr]
        requires_grad=bool(first.requires_grad),
    )
    return wrap(leaf, layout, spec, group)


def leaf_of(
    layout: Layout,
    group: Group,
    by_box: Mapping[Box, torch.Tensor],
    dtype: torch.dtype | None,
    *,
    device: torch.device | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Return the tensor that holds a rank's shards: the only one as it is, several packed, an empty one for none.
    Shards that are results of a graph stay in it."""
    boxes = layout.boxes(group.rank)
    if len(boxes) == 1 and not layout.packed:
        return by_box[boxes[0]]
    if not boxes:
        shape = layout.local_shape(group.rank)
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)
    packed = torch.cat([by_box[box].reshape(-1) for box in boxes])
    if all(by_box[box].is_leaf for box in boxes):
        return packed.detach().requires_grad_(packed.requires_grad)
    return packed


def _checked_shards(shards: Sequence[Shard], global_size: Sequence[Any], rank: int) -> RankShards:
    """Return what this rank passes, or raise the error in it."""
    size = _given_size(global_size)
    if size is None:
        raise LayoutError(
            "the global size is not given", fix="pass it after the shards, or None for the dim along which they add up"
        )
    for shard in shards:
        _check_shard(shard, rank)
    held = [TensorProperties.create_from_tensor(shard.tensor) for shard in shards]
    properties = {name: {getattr(each, name) for each in held} for name in PROPERTIES}
    for name, found in properties.items():
        if len(found) > 1:
            raise LayoutError(
                f"Local shards' tensor {name} property need to be the same on rank:{rank}!",
                {"found": " and ".join(sorted(map(str, found)))},
                "convert them to one",
            )
    return RankShards(
        size,
        tuple((*_box(shard.metadata), str(shard.metadata.placement)) for shard in shards),
        *(next(iter(found), None) for found in properties.values()),
    )


def _check_shard(shard: Shard, rank: int) -> None:
    """Raise LayoutError if a shard is not contiguous, or its rank, size or device differs from its metadata."""
    tensor, metadata = shard.tensor, shard.metadata
    if tensor.layout != torch.strided:
        raise LayoutError(
            f"Only torch.strided layout is currently supported, but found {tensor.layout} on rank:{rank}!",
            fix="call to_dense() first",
        )
    if not tensor.is_contiguous():
        raise LayoutError(
            "Only torch.contiguous_format memory_format is currently supported!", fix="call contiguous() first"
        )
    check_metadata(tensor, metadata)
    placement = metadata.placement
    if placement is None or rank_of(placement) != rank:
        raise LayoutError(
            "Local shard metadata's rank does not match with the rank in its process group!",
            {"this rank": rank, "placement": placement},
            "name this rank in the placement of its shards",
        )


def _check_properties(holders: Mapping[int, RankShards]) -> None:
    """Raise the same error on every rank if no rank has shards, or if they differ in size or in a property."""
    if not holders:
        raise LayoutError("ShardedTensor have no local shards on all ranks!", fix="pass at least one shard")
    for name, shown in [("size", "global_size"), *((name, name) for name in PROPERTIES)]:
        values = {rank: getattr(own, name) for rank, own in holders.items()}
        first = next(iter(values))
        other = next((rank for rank, value in values.items() if value != values[first]), None)
        if other is not None:
            raise LayoutError(
                f"ShardedTensor {shown} property does not match from different ranks! "
                f"Found {shown}={values[first]} on rank:{first}, and {shown}={values[other]} on rank:{other}.",
                fix="pass the same on every rank; nothing was made on any rank",
            )


def _joined(holders: Mapping[int, RankShards]) -> tuple[Shape, list[tuple[int, ShardMetadata]]]:
    """Return the global shape and every shard with its rank, in rank order; raises the same error on every rank."""
    shards = [(rank, ShardMetadata(*shard)) for rank, own in holders.items() for shard in own.shards]
    size = next(iter(holders.values())).size
    unknown = [dim for dim, length in enumerate(size) if length is None]
    if not unknown:
        return tuple(length for length in size if length is not None), shards
    ndim, dim = len(size), unknown[0] if len(unknown) == 1 else 0
    lengths = [shard.shard_sizes for _, shard in shards]
    other = next((found for found in lengths if len(found) != ndim), None)
    if other is not None:
        raise LayoutError(
            f"Rank of tensor is {ndim}, but shards rank is {len(other)}",
            {"global size": by(size), "shard of size": by(other)},
            "give one number or None for each dim of the shards",
        )
    starts = list(accumulate((found[dim] for found in lengths), initial=0))
    for start, (_, shard) in zip(starts, shards, strict=False):
        shard.shard_offsets = [start if d == dim else 0 for d in range(ndim)]
    shape = [lengths[0][d] if length is None else length for d, length in enumerate(size)]
    shape[dim] = starts[-1]
    return tuple(shape), shards


def _box(shard: ShardMetadata) -> Box:
    return Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))


def init_from_local_tensor(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec | str,
    *global_size: Any,
    process_group: Any = None,
) -> ShardedTensor:
    """Wrap each rank's local tensor as its part under a spec, without a copy. All ranks of the group call it.

    One small exchange checks that all ranks agree. A partial spec makes each rank's tensor a partial sum.

    Args:
        local_tensor: of the local shape that the spec gives this rank, contiguous; it becomes the leaf.
        sharding_spec: a spec or its text.
        global_size: the global shape. Without it, or with None for some dims, it is computed from the local shapes of
            all ranks, which takes another exchange.
        process_group: a process group, a DeviceMesh, or None for the default group.

    Raises:
        LayoutError: (a ValueError) the same on every rank: a local tensor does not have the shape that the spec gives.
        DisagreementError: (a ValueError) the ranks pass different specs, sizes or dtypes.

    Example:
        >>> init_from_local_tensor(torch.ones(2, 3), "[tp, -]").shape
        torch.Size([2, 3])
    """
    group = as_group(process_group)
    read, fault = _caught(lambda: _read(local_tensor, sharding_spec, global_size, group))
    spec, size, layout = read or (None, None, None)
    facts = {
        "sharding_spec": str(spec),
        "global_size": "not given" if size is None else by(size),
        "dtype": str(getattr(local_tensor, "dtype", None)),
        "requires_grad": str(getattr(local_tensor, "requires_grad", None)),
    }
    agree(group, "init_from_local_tensor", facts, fault)
    assert spec is not None
    if layout is None:
        shapes = dict(zip(group.ranks, group.exchange_objects(tuple(local_tensor.shape)), strict=True))
        layout = _fitting(spec, size, shapes, group)
    return wrap(local_tensor, layout, spec, group)


def _read(
    local: torch.Tensor, sharding_spec: ShardingSpec | str, global_size: Sequence[Any], group: Group
) -> tuple[ShardingSpec, Size | None, Layout | None]:
    """Return the spec, the size, and the layout if the size is known; raise the error in this rank's part."""
    spec, size = as_spec(sharding_spec), _given_size(global_size)
    if not isinstance(local, torch.Tensor) or isinstance(local, ShardedTensor):
        raise LayoutError(
            f"local_tensor is a {type(local).__name__}, not a plain tensor", fix="pass this rank's part as a tensor"
        )
    if local.layout != torch.strided or not local.is_contiguous():
        raise LayoutError("local_tensor is not a contiguous Tensor.", fix="call contiguous() first")
    placement = placement_of(spec, group.rank)
    if placement is not None and not same_device(placement.device(), local.device):
        raise LayoutError(
            "Local shard tensor device does not match with local Shard's placement!",
            {"tensor": local.device, "placement": placement},
            "move the tensor, or name its device in the spec",
        )
    if size is None or None in size:
        return spec, size, None
    layout = bind_named(spec, tuple(length for length in size if length is not None), mesh_of(group))
    expected = layout.local_shape(group.rank)
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"the local tensor of rank {group.rank} is {by(local.shape)}, the spec gives it {by(expected)}",
            {"spec": str(spec), "global size": by(size)},
            "pass the true global size, or a spec with sizes(...) that says how the ranks differ",
        )
    return spec, size, layout


def _fitting(spec: ShardingSpec, size: Size | None, shapes: Mapping[int, Shape], group: Group) -> Layout:
    """Return the layout whose local shapes are those of the ranks: it tries sums of lengths along axes of the mesh."""
    mesh = mesh_of(group)
    given = size or (None,) * len(shapes[mesh.ranks[0]])
    if all(len(shape) == len(given) for shape in shapes.values()):
        axes = range(len(mesh.sizes))
        some_axes = [chosen for count in range(len(axes) + 1) for chosen in combinations(axes, count)]
        lines = [mesh.ranks_along(mesh.ranks[0], chosen) for chosen in some_axes]
        lengths = [
            sorted({sum(shapes[rank][dim] for rank in line) for line in lines}) if length is None else [length]
            for dim, length in enumerate(given)
        ]
        for shape in product(*lengths):
            with suppress(LayoutError):
                layout = bind_named(spec, shape, mesh)
                if all(layout.local_shape(rank) == local for rank, local in shapes.items()):
                    return layout
    raise LayoutError(
        "the global size does not follow from the local shapes",
        {"spec": str(spec), **{f"rank {rank}": by(shape) for rank, shape in list(shapes.items())[:8]}},
        "pass the global size after the spec; or sizes(...) in the spec where the parts are uneven",
    )


def _caught(work: Any) -> tuple[Any, ShardTensorError | None]:
    """Return the result of `work`, or the error to send to the other ranks, which wait for this one."""
    try:
        return work(), None
    except ShardTensorError as error:
        return None, error
    except Exception as error:
        fault = LayoutError(f"{type(error).__name__}: {error}")
        fault.__cause__ = error
        return None, fault


def _given_size(global_size: Sequence[Any]) -> Size | None:
    """Return the size given as ``(4, 6)``, ``((4, 6),)`` or ``(None, 6)``; None for ``()``."""
    if len(global_size) == 1 and isinstance(global_size[0], Sequence):
        global_size = global_size[0]
    elif not global_size:
        return None
    size = tuple(None if length is None else index(length) for length in global_size)
    if any(length is not None and length < 0 for length in size):
        raise LayoutError(f"a tensor cannot have the size {by(size)}", fix="give the number of elements of each dim")
    return size
