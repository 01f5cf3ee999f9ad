"""Sharded tensors from what ranks already hold: `init_from_local_shards`, `init_from_local_tensor`.

Ranks can disagree here, so one exchange of what each brings (never of tensors' contents) comes before anything is
made, and every fault is the same error on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.layout.bind import bind
from shardtensor.layout.box import Box
from shardtensor.layout.layout import Layout
from shardtensor.layout.listed import listed_layout
from shardtensor.layout.tiling import check_tiling
from shardtensor.spec.devices import EnumerableShardingSpec, ShardMetadata
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.shard import Shard, same_device
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


@attrs.frozen
class Brought:
    """What one rank brings, as small values that travel."""

    size: tuple[int | None, ...] | None
    shards: tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]
    dtype: str | None
    requires_grad: bool | None
    pin_memory: bool | None
    fault: tuple[str, str] | None


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """Return the sharded tensor that the ranks' shards make up. All ranks of the group call it: one exchange.

    A rank's single shard becomes the tensor's leaf as it is, without a copy; several are packed into one.

    Args:
        local_shards: this rank's shards, perhaps none; placements say global ranks.
        global_size: the global shape; ``None`` for each dim to lay the shards end to end along dim 0, in rank order.

    Raises:
        LayoutError: (a ValueError) on every rank alike: no size, holes, overlaps, a property that differs between ranks.

    Example:
        >>> piece = Shard(torch.ones(4), ShardMetadata([0], [4], "rank:0/cpu"))
        >>> init_from_local_shards([piece], 4).full_tensor()
        tensor([1., 1., 1., 1.])
    """
    group = as_group(process_group)
    size = _given_size(global_size)
    if init_rrefs:
        raise RuntimeError("RPC Framework needs to be initialized for init_rrefs=True; shards are not shown over RPC")
    fault = _fault_of(local_shards, group, size)
    brought = Brought(
        size,
        tuple((tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes), str(s.metadata.placement)) for s in local_shards),
        str(local_shards[0].tensor.dtype) if local_shards else None,
        local_shards[0].tensor.requires_grad if local_shards else None,
        local_shards[0].tensor.is_pinned() if local_shards else None,
        None if fault is None else (type(fault).__name__, str(fault)),
    )
    everyone = group.exchange_objects(brought)
    shape, shards = _joined(everyone, group)
    spec = EnumerableShardingSpec(shards)
    owned = tuple((shard.placement.rank(), Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))) for shard in spec.shards)
    check_tiling(owned, shape)
    layout = listed_layout(owned, shape)
    by_box = {_box_of(group, shards, i, shard): shard.tensor for i, shard in enumerate(local_shards)}
    dtype = next(b.dtype for b in everyone if b.dtype is not None)
    return wrap(_local_of(layout, group, by_box, dtype), layout, spec, group)


def _box_of(group: Group, shards: Sequence[ShardMetadata], index: int, shard: Shard) -> Box:
    """The box of this rank's shard `index` in the joined list, whose offsets may have been worked out anew."""
    mine = [s for s in shards if s.placement is not None and s.placement.rank() == group.rank]
    return Box(tuple(mine[index].shard_offsets), tuple(mine[index].shard_sizes))


def _local_of(layout: Layout, group: Group, by_box: dict[Box, torch.Tensor], dtype: str) -> torch.Tensor:
    boxes = layout.boxes(group.rank)
    if len(boxes) == 1 and not layout.packed:
        return by_box[boxes[0]]
    if not boxes:
        return torch.empty(layout.local_shape(group.rank), dtype=getattr(torch, dtype.removeprefix("torch.")))
    tensors = [by_box[box] for box in boxes]
    packed = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return packed.requires_grad_(tensors[0].requires_grad)


def _given_size(global_size: tuple[Any, ...]) -> tuple[int | None, ...] | None:
    if len(global_size) == 1 and not isinstance(global_size[0], int) and global_size[0] is not None:
        return tuple(global_size[0])
    return tuple(global_size) or None


def _fault_of(shards: Sequence[Shard], group: Group, size: tuple[int | None, ...] | None) -> ShardTensorError | None:
    """What is wrong with this rank's own shards."""
    if size is None:
        return LayoutError(
            "the global size is not given", fix="pass it after the shards, or None for each dim to add the rows up"
        )
    for shard in shards:
        tensor, placement = shard.tensor, shard.metadata.placement
        if tensor.layout != torch.strided:
            return LayoutError(f"Only torch.strided layout is currently supported, but found {tensor.layout} on rank:{group.rank}!")
        if not tensor.is_contiguous():
            return LayoutError("Only torch.contiguous_format memory_format is currently supported!", fix="contiguous()")
        if placement is None or placement.rank() != group.rank:
            return LayoutError(
                "Local shard metadata's rank does not match with the rank in its process group!",
                {"this rank": group.rank, "placement": placement},
                "name this rank in the placement of its shards",
            )
        if not same_device(placement.device(), tensor.device):
            return LayoutError(
                "Local shard tensor device does not match with local Shard's placement!",
                {"tensor": tensor.device, "placement": placement},
            )
        for name in ("dtype", "requires_grad", "is_pinned"):
            first, other = (getattr(s.tensor, name) for s in (shards[0], shard))
            first, other = (first(), other()) if callable(first) else (first, other)
            if first != other:
                what = "pin_memory" if name == "is_pinned" else name
                return LayoutError(
                    f"Local shards' tensor {what} property need to be the same on rank:{group.rank}!",
                    {"found": f"{first} and {other}"},
                )
    return None


def _joined(everyone: Sequence[Brought], group: Group) -> tuple[tuple[int, ...], list[ShardMetadata]]:
    """The global shape and all shards, in rank order; raises the same error on every rank."""
    faults = {rank: brought.fault for rank, brought in zip(group.ranks, everyone, strict=True) if brought.fault}
    if faults:
        text = next(iter(faults.values()))[1]
        if len(faults) == group.size and len({fault[1] for fault in faults.values()}) == 1:
            raise LayoutError(text)
        raise LayoutError(text, {"on ranks": ", ".join(map(str, faults)), "state": "nothing was made on any rank"})
    holders = [(rank, brought) for rank, brought in zip(group.ranks, everyone, strict=True) if brought.shards]
    if not holders:
        raise LayoutError("ShardedTensor have no local shards on all ranks!", fix="bring at least one shard")
    for name, shown in (("size", "global_size"), ("dtype",) * 2, ("requires_grad",) * 2, ("pin_memory",) * 2):
        values = {rank: getattr(brought, name) for rank, brought in holders}
        first = next(iter(values))
        other = next((rank for rank, value in values.items() if value != values[first]), None)
        if other is not None:
            raise LayoutError(
                f"ShardedTensor {shown} property does not match from different ranks! "
                f"Found {shown}={values[first]} on rank:{first}, and {shown}={values[other]} on rank:{other}.",
                fix="bring the same on every rank; nothing was made on any rank",
            )
    size = holders[0][1].size
    assert size is not None
    shards = [ShardMetadata(*shard) for _, brought in holders for shard in brought.shards]
    if size[0] is None:
        starts = [0, *accumulate(shard.shard_sizes[0] for shard in shards)]
        for start, shard in zip(starts, shards, strict=False):
            shard.shard_offsets = [start] + [0] * (len(shard.shard_sizes) - 1)
        return (starts[-1], *shards[0].shard_sizes[1:]), shards
    return tuple(int(length or 0) for length in size), shards


def init_from_local_tensor(
    local_tensor: torch.Tensor, sharding_spec: ShardingSpec | str, *global_size: Any, process_group: Any = None
) -> ShardedTensor:
    """Wrap each rank's local tensor as its part under a spec, without a copy. All ranks of the group call it.

    One exchange tells the ranks the true global size and that all agree. A partial spec makes each rank's tensor an
    addend.

    Args:
        local_tensor: of the local shape that the spec gives this rank, contiguous; it becomes the leaf.
        sharding_spec: a spec or its text.
        global_size: the global shape; left out, it is worked out from the local shapes where one dim is cut.

    Raises:
        LayoutError: (a ValueError) on every rank alike, when a local tensor is not what the spec gives its rank.

    Example:
        >>> init_from_local_tensor(torch.ones(2, 3), "[tp, -]").shape
        torch.Size([2, 3])
    """
    group = as_group(process_group)
    spec = as_spec(sharding_spec)
    size = _given_size(global_size)
    facts = (
        tuple(local_tensor.shape), str(local_tensor.dtype), str(local_tensor.device.type), str(spec), size,
        local_tensor.is_contiguous(), local_tensor.requires_grad,
    )  # fmt: skip
    everyone = dict(zip(group.ranks, group.exchange_objects(facts), strict=True))
    for i, what in ((1, "dtype"), (3, "sharding_spec"), (4, "global_size"), (6, "requires_grad")):
        values = {rank: facts[i] for rank, facts in everyone.items()}
        if len(set(values.values())) > 1:
            raise LayoutError(
                f"ShardedTensor {what} property does not match from different ranks!",
                {f"rank {rank}": value for rank, value in values.items()},
                "bring the same on every rank; nothing was made on any rank",
            )
    strided = [rank for rank, facts in everyone.items() if not facts[5]]
    if strided:
        raise LayoutError("local_tensor is not a contiguous Tensor.", {"on ranks": strided}, "call contiguous() first")
    shape = size if size is not None else _size_from(spec, {rank: facts[0] for rank, facts in everyone.items()}, group)
    layout = bind(spec, tuple(int(length or 0) for length in shape), mesh_of(group))
    wrong = {
        f"rank {rank}": f"brought {_by(facts[0])}, the spec gives it {_by(layout.local_shape(rank))}"
        for rank, facts in everyone.items()
        if facts[0] != layout.local_shape(rank)
    }
    if wrong:
        raise LayoutError(
            "local tensors do not have the shapes that the spec gives their ranks",
            {"spec": str(spec), "global size": _by(layout.shape), **dict(list(wrong.items())[:8])},
            "pass the true global size, or a spec with sizes(...) that says how the ranks differ",
        )
    return wrap(local_tensor, layout, spec, group)


def _by(shape: Sequence[int | None]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _size_from(spec: ShardingSpec, shapes: dict[int, tuple[int, ...]], group: Group) -> tuple[int, ...]:
    """The global size that makes every rank's local shape what the spec gives it: the one dim that differs added up."""
    first = shapes[group.ranks[0]]
    if all(len(shape) == len(first) for shape in shapes.values()):
        for dim in range(len(first)):
            total = sum(shape[dim] for shape in shapes.values())
            candidates = {total, *({first[dim]} if dim == 0 else ())}
            for length in sorted(candidates, reverse=True):
                shape = (*first[:dim], length, *first[dim + 1 :])
                try:
                    layout = bind(spec, shape, mesh_of(group))
                except LayoutError:
                    continue
                if all(layout.local_shape(rank) == local for rank, local in shapes.items()):
                    return shape
    raise LayoutError(
        "the global size does not follow from the local shapes",
        {"spec": str(spec), **{f"rank {rank}": _by(shape) for rank, shape in list(shapes.items())[:8]}},
        "pass the global size after the spec",
    )
