"""From a spec, a shape and a group to a layout and a device, and from a layout back to a spec."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group, rank_of, rank_seen, world_place
from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.cutting import axis_form
from shardtensor.layout.layout import FlatLayout, Layout, MeshLayout
from shardtensor.layout.pieces import Blocked, chunked
from shardtensor.mesh import Mesh, as_ranks
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.spec.placement import Placement, Run


def device_for(spec: ShardingSpec, group: Group, like: torch.device | None = None) -> torch.device:
    """Return the device for this rank's part: its placement's, else the group's, else `like`'s or torch's default.

    Raises:
        LayoutError: a placement, of any rank, names a device that machines like this one do not have.
    """
    for run in () if isinstance(spec, EnumerableShardingSpec) else _runs(spec):
        if run.first.device_type == "cuda":
            present(run[run.count - 1])  # the largest index: the same verdict on every rank
    placement = placement_of(spec, group.rank)
    if placement is not None:
        return present(placement)
    if like is None:
        like = torch.get_default_device()
    return own_device("cuda") if like.type == "cpu" and group.device_type == "cuda" else like


def present(placement: Placement) -> torch.device:
    """Return the device of a placement, with its index; raise if this machine does not have it."""
    kind, index = placement.device_type, placement.device_index
    if kind == "cuda":
        _check_cuda(placement.device(), {"placement": str(placement)}, f'write "rank:{placement.rank()}/cpu"')
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return torch.device(kind) if index is None else torch.device(kind, index)


def _check_cuda(device: torch.device, facts: dict[str, str], without_any: str) -> None:
    """Raise LayoutError unless this machine has the device. `without_any` is the fix for a machine without GPUs."""
    count = torch.cuda.device_count()
    if not count or (device.index or 0) >= count:
        raise LayoutError(
            f"there is no device {device} here",
            {**facts, "cuda devices": count},
            "name a device that this rank's machine has" if count else without_any,
        )


def requested_device(spec: ShardingSpec, group: Group, device: torch.device) -> torch.device:
    """Return the device of a new local tensor if a caller names `device`; cuda without an index is the rank's own."""
    kinds = {run.first.device_type for run in _runs(spec)}
    if kinds and device.type != "meta":
        if kinds != {device.type} or device.index is not None:
            raise LayoutError(
                f"device={device} is asked of a spec that names the device of each rank",
                {"spec": str(spec)},
                "leave device= out, or write a spec of axes, as [tp, -]",
            )
        return device_for(spec, group)
    if device.type == "cuda":
        _check_cuda(device, {}, 'write device="cpu"')
    return own_device(device.type) if device.index is None else device


def _runs(spec: ShardingSpec) -> Sequence[Run]:
    """Return the placements that a spec names for all ranks, as runs; none for specs of axes."""
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        return spec.placements.runs
    if isinstance(spec, EnumerableShardingSpec):
        return [Run(box.placement) for box in spec.boxes if box.placement is not None]
    return ()


def own_device(kind: str) -> torch.device:
    """Return this rank's own device of a type."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def placement_of(spec: ShardingSpec, rank: int) -> Placement | None:
    """Return the first placement that a device spec gives a rank; None for specs that name no devices."""
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        index = spec.placements.index_of(rank)
        if index is not None:
            return spec.placements[index]
    return next((run.first for run in _runs(spec) if rank_seen(run.first) == rank), None)


def moved(spec: ShardingSpec | None, layout: Layout, device: torch.device) -> ShardingSpec | None:
    """Return the spec of a tensor after a move to devices of another type; None if it follows from the layout."""
    if isinstance(spec, EnumerableShardingSpec):
        return enumerated(layout, device)
    return spec if isinstance(spec, Spec) else None


def mesh_of(group: Group) -> Mesh:
    """Return the mesh of a group made from a DeviceMesh, else its ranks along one unnamed axis. Torch does not list
    the ranks of a group that this process is no member of: the mesh then has all ranks."""
    if group.mesh is not None:
        return group.mesh
    if not group.size:
        world = world_place()
        return Mesh((("*", 1 if world is None else world[1]),))
    kept: dict[str, Mesh] = vars(group)
    if "_one_axis" not in kept:
        kept["_one_axis"] = Mesh((("*", group.size),), group.ranks)
    return kept["_one_axis"]


def spec_of(layout: Layout, device: torch.device) -> ShardingSpec:
    """Return the spec of a layout: with placements of this rank's device type if a device form exists, else by axes.
    Unnamed axes are called ``axis0``, ``axis1``, ..."""
    if isinstance(layout, MeshLayout):
        device_form = None if layout.names or layout.partial else _device_form(layout, device)
        return axis_form(layout) if device_form is None else device_form
    if isinstance(layout, FlatLayout):
        return axis_form(layout)
    return enumerated(layout, device)


def enumerated(layout: Layout, device: torch.device) -> EnumerableShardingSpec:
    """Return a spec that lists every box of a layout; of replicas, the first rank's."""
    shards = [
        ShardMetadata(box.offsets, box.sizes, f"rank:{rank}/{device.type}")
        for rank in layout.ranks
        if layout.holds_first_copy(rank)
        for box in layout.boxes(rank)
    ]
    return EnumerableShardingSpec(shards)


def _device_form(layout: MeshLayout, device: torch.device) -> ShardingSpec | None:
    """Return the chunk or grid spec of a layout without replicas, None if neither can express it."""
    cuts = [cut for cut in layout.dims if cut is not None]
    if [cut.axes for cut in cuts] != [(axis,) for axis in range(len(layout.grid))]:
        return None
    as_chunks = all(cut.pieces == chunked(cut.pieces.length, cut.pieces.count) for cut in cuts)
    if len(cuts) == 1 and not isinstance(cuts[0].pieces, Blocked):
        sizes = None if as_chunks else tuple(cuts[0].pieces.size(i) for i in range(cuts[0].pieces.count))
        return ChunkShardingSpec(layout.cut_dims[0], _placements(layout.ranks, device), sizes)
    if as_chunks:
        splits = tuple(1 if cut is None else cut.pieces.count for cut in layout.dims)
        return GridShardingSpec(splits, _placements(layout.ranks, device))
    return None


@lru_cache(maxsize=256)
def _placements(ranks: range | tuple[int, ...], device: torch.device) -> tuple[str, ...]:
    ranks = as_ranks(ranks)
    if isinstance(ranks, range):
        first, last = ranks[0], ranks[-1]
        return (f"rank:{first}-{last}/{device.type}" if last > first else f"rank:{first}/{device.type}",)
    return tuple(f"rank:{rank}/{device.type}" for rank in ranks)


def bind_to(
    spec: ShardingSpec | str,
    shape: tuple[int, ...],
    process_group: Any = None,
    dim_names: tuple[str, ...] | None = None,
) -> tuple[ShardingSpec, Group, Layout]:
    """Read the spec, find the group and bind them to a shape. Sends nothing; raises SpecError or LayoutError."""
    spec = as_spec(spec)
    group = as_group(process_group)
    if not group.size and isinstance(spec, Spec):
        raise LayoutError(
            f"rank {group.rank} is not a member of the process group: what the axes of the spec mean is unknown here",
            {"spec": str(spec)},
            ["call this on the members only", "use a spec that names its ranks, such as chunk(...)"],
        )
    return spec, group, bind_named(spec, shape, mesh_of(group), dim_names)


def bind_named(
    spec: ShardingSpec, shape: tuple[int, ...], mesh: Mesh, dim_names: tuple[str, ...] | None = None
) -> Layout:
    """Return the same as `bind`, also for placements that name RPC workers: if `bind` raises, RPC gives their ranks."""
    try:
        return bind(spec, shape, mesh, dim_names)
    except LayoutError:
        numbered = _numbered(spec)
        if numbered is None:
            raise
    return bind(numbered, shape, mesh, dim_names)


def _numbered(spec: ShardingSpec) -> ShardingSpec | None:
    """Return the spec with ranks in place of workers; None when it names no worker."""
    if all(run.first.worker is None for run in _runs(spec)):
        return None
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        return attrs.evolve(spec, placements=[_with_rank(place) for place in spec.placements])
    assert isinstance(spec, EnumerableShardingSpec)
    shards = spec.shards
    for shard in shards:
        shard.placement = None if shard.placement is None else _with_rank(shard.placement)
    return EnumerableShardingSpec(shards)


def _with_rank(place: Placement) -> Placement:
    return attrs.evolve(place, worker=None, rank_=rank_of(place))
