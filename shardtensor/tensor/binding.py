"""From what a user passes (a spec or text, a shape, a process group) to a spec, a group and a layout."""

from __future__ import annotations

from typing import Any

import attrs

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.comm.workers import rank_of
from shardtensor.errors import LayoutError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import Layout
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.spec.placement import Placement
from shardtensor.tensor.placing import mesh_of


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
    """As `bind`, for specs whose placements may name RPC workers; RPC is asked once `bind` has refused those."""
    try:
        return bind(spec, shape, mesh, dim_names)
    except LayoutError:
        numbered = _numbered(spec)
        if numbered is None:
            raise
    return bind(numbered, shape, mesh, dim_names)


def _numbered(spec: ShardingSpec) -> ShardingSpec | None:
    """The spec with ranks in place of workers; None when it names no worker."""
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        if all(run.first.worker is None for run in spec.placements.runs):
            return None
        return attrs.evolve(spec, placements=[_with_rank(place) for place in spec.placements])
    if isinstance(spec, EnumerableShardingSpec):
        if all(box.placement is None or box.placement.worker is None for box in spec.boxes):
            return None
        return EnumerableShardingSpec([_with_rank_of(shard) for shard in spec.shards])
    return None


def _with_rank_of(shard: ShardMetadata) -> ShardMetadata:
    return attrs.evolve(shard, placement=None if shard.placement is None else _with_rank(shard.placement))


def _with_rank(place: Placement) -> Placement:
    return attrs.evolve(place, worker=None, rank_=rank_of(place))
