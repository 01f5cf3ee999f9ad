"""Which device a rank's part is on, and how a layout is said as a spec."""

from __future__ import annotations

from functools import lru_cache

import attrs
import torch

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import world_place
from shardtensor.errors import LayoutError
from shardtensor.layout.layout import CutLayout, FlatLayout, Layout
from shardtensor.layout.pieces import Balanced, Blocked, Pieces, Stepped, chunked
from shardtensor.mesh import Mesh, as_ranks
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import Cut, Replicate, ShardingSpec, Spec
from shardtensor.spec.placement import Placement


def device_for(spec: ShardingSpec, group: Group) -> torch.device:
    """The device this rank's part shall be on: its placement's, else the one the group moves.

    Raises:
        LayoutError: the placement's device is not on this machine.
    """
    placement = placement_of(spec, group.rank)
    if placement is None:
        return own_device(group.device_type)
    return present(placement)


def present(placement: Placement) -> torch.device:
    """The device of a placement, with its index, checked to be there."""
    kind, index = placement.device_type, placement.device_index
    if kind == "cuda":
        count = torch.cuda.device_count()
        if not count or (index is not None and index >= count):
            raise LayoutError(
                f"there is no device {placement.device()} here",
                {"placement": str(placement), "cuda devices": count},
                "name a device that this rank's machine has" if count else f'write "rank:{placement.rank()}/cpu"',
            )
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return torch.device(kind) if index is None else torch.device(kind, index)


def own_device(kind: str) -> torch.device:
    """This rank's own device of a kind."""
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def placement_of(spec: ShardingSpec, rank: int) -> Placement | None:
    """The first placement that a device spec gives a rank; None for specs that name no devices."""
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        index = spec.placements.index_of(rank)
        return None if index is None else spec.placements[index]
    if isinstance(spec, EnumerableShardingSpec):
        return next((s.placement for s in spec.shards if s.placement is not None and s.placement.rank() == rank), None)
    return None


def placement_text(spec: ShardingSpec, rank: int, device: torch.device) -> str:
    """How the placement of a rank is written: as its spec says, else by the device that this rank uses."""
    placement = placement_of(spec, rank)
    if placement is not None:
        return str(placement)
    return f"rank:{rank}/{device}" if device.type != "cuda" else f"rank:{rank}/cuda"


def moved(spec: ShardingSpec | None, kind: str) -> ShardingSpec | None:
    """The spec of a tensor whose every shard went to a device of another kind: same dims, same ranks, new devices.

    Indices are left out: each rank means its own device. None where the spec has to be told from the layout.
    """
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        runs = [
            attrs.evolve(run, first=attrs.evolve(run.first, device_type=kind, device_index=None), index_step=0)
            for run in spec.placements.runs
        ]
        return attrs.evolve(spec, placements=[str(run) for run in runs])
    if isinstance(spec, EnumerableShardingSpec):
        shards = spec.shards
        for shard in shards:
            if shard.placement is not None:
                shard.placement = attrs.evolve(shard.placement, device_type=kind, device_index=None)
        return EnumerableShardingSpec(shards)
    return spec if isinstance(spec, Spec) else None


_MESHES: dict[Group, Mesh] = {}


def mesh_of(group: Group) -> Mesh:
    """The named grid of a group that came from a DeviceMesh, else its ranks along one axis without a name.

    Torch does not tell a process which ranks are in a group that it is not a member of; all ranks stand for them, so
    that specs which name their ranks can be told there too.
    """
    if group.mesh is not None:
        return group.mesh
    if not group.size:
        world = world_place()
        return Mesh((("*", 1 if world is None else world[1]),))
    mesh = _MESHES.get(group)
    if mesh is None:
        mesh = _MESHES[group] = Mesh((("*", group.size),), group.ranks)
    return mesh


def spec_of(layout: Layout, device: torch.device) -> ShardingSpec:
    """Say a layout as a spec: by axis names where it has them, else with placements of this rank's kind of device."""
    if isinstance(layout, CutLayout):
        if not layout.cut_dims:
            return Replicate()
        if layout.names and "*" not in layout.names:
            cuts = [None if cut is None else _cut(layout, cut.axes, cut.pieces) for cut in layout.dims]
            spec = Spec(*cuts)
            for axis, op in layout.partial:
                spec = spec.partial(layout.names[axis], op=op)
            return spec
        one_box = all(cut is None or not isinstance(cut.pieces, Blocked) for cut in layout.dims)
        if one_box and len(layout.cut_dims) == 1 and len(layout.grid) == 1:
            (dim,) = layout.cut_dims
            pieces = layout.dims[dim].pieces  # type: ignore[union-attr]
            sizes = None if pieces == chunked(pieces.length, pieces.count) else _sizes(pieces)
            return ChunkShardingSpec(dim, _placements(layout.ranks, device), sizes)
        by_axis = one_box and [axis for cut in layout.dims if cut for axis in cut.axes] == list(range(len(layout.grid)))
        if by_axis and all(
            cut is None or (len(cut.axes) == 1 and cut.pieces == chunked(cut.pieces.length, cut.pieces.count))
            for cut in layout.dims
        ):
            splits = tuple(1 if cut is None else cut.pieces.count for cut in layout.dims)
            return GridShardingSpec(splits, _placements(layout.ranks, device))
    if isinstance(layout, FlatLayout) and not layout.inner.cut_dims and layout.names:
        return Spec().flat(*(layout.names[axis] for axis in layout.axes), unit=layout.unit or "row", sizes=layout.sizes)
    kind = device.type
    shards = [
        ShardMetadata(box.offsets, box.sizes, f"rank:{rank}/{kind}")
        for rank in layout.ranks
        for box in dict.fromkeys(layout.boxes(rank))
    ]
    return EnumerableShardingSpec(shards)


@lru_cache(maxsize=256)
def _placements(ranks: range | tuple[int, ...], device: torch.device) -> tuple[str, ...]:
    ranks = as_ranks(ranks)
    if isinstance(ranks, range):
        first, last = ranks[0], ranks[-1]
        return (f"rank:{first}-{last}/{device.type}" if last > first else f"rank:{first}/{device.type}",)
    return tuple(f"rank:{rank}/{device.type}" for rank in ranks)


def _sizes(pieces: Pieces) -> tuple[int, ...]:
    return tuple(pieces.size(i) for i in range(pieces.count))


def _cut(layout: CutLayout, axes: tuple[int, ...], pieces: Pieces) -> Cut:
    names = tuple(layout.names[axis] for axis in axes)
    if isinstance(pieces, Stepped) and pieces.step * pieces.count == pieces.length:
        return Cut(names)
    if isinstance(pieces, Balanced):
        return Cut(names, balanced=True, unit=pieces.unit)
    if isinstance(pieces, Blocked) and all(block == pieces.blocks[0] for block in pieces.blocks):
        return Cut(names, blocks=len(pieces.blocks))
    return Cut(names, sizes=_sizes(pieces))
