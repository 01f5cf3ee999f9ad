"""Pickles of groups: a pickle holds the ranks and this rank's place; a rank in the same place gets its group back.

A subgroup that the reading process does not have is made anew; its members must all read the same pickles in one order.
"""

from __future__ import annotations

import copyreg
from typing import Any

from shardtensor.comm.checked import CheckedGroup
from shardtensor.comm.group import Group, SingleRankGroup, group_on_mesh
from shardtensor.comm.process_group import as_group, world_place
from shardtensor.comm.torch_group import TorchGroup
from shardtensor.errors import LayoutError
from shardtensor.mesh import Mesh

RankInfo = tuple[int, int, int, int]
MeshState = tuple[Any, Any]


def rank_info(group: Group) -> RankInfo | None:
    """Return the rank in the group and in the world, and the sizes of both; None without process groups."""
    world = world_place()
    return None if world is None else (group.index, world[0], group.size, world[1])


def mesh_state(group: Group) -> MeshState | None:
    """Return the axes and ranks of the group's mesh."""
    return None if group.mesh is None else (group.mesh.axes, tuple(group.mesh.ranks))


def unpickle_group(info: RankInfo | None, mesh: MeshState | None, ranks: tuple[int, ...] | None = None) -> Group:
    """Return the subgroup of `as_group(None)` with these ranks, or all of it without `ranks`.

    Raises:
        RuntimeError: there is no process group, or this process has another rank or world size than the writing one.
        LayoutError: the ranks are not in the group.
    """
    if info is not None and world_place() is None:
        raise RuntimeError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor'
        )
    group = as_group(None)
    if ranks is not None and ranks != tuple(group.ranks):
        if not set(ranks) <= set(group.ranks):
            raise LayoutError(
                "a module was pickled by a group of other ranks",
                {"written by": f"ranks {', '.join(map(str, ranks))}", "read by": f"{group.size} ranks"},
                "load inside load_with_process_group(group), with the group that has these ranks",
            )
        if info is not None:  # before `subgroup` waits for the other ranks
            rank, size = world_place() or (0, 1)
            _check_rank((0, info[1], 0, info[3]), (0, rank, 0, size))
        group = group.subgroup(ranks)
    _check_rank(info or (0, 0, 1, 1), rank_info(group) or (0, 0, 1, 1))
    return group if mesh is None or group.mesh is not None else _on_mesh(group, mesh)


def _check_rank(saved: RankInfo, found: RankInfo) -> None:
    names = ("Local rank", "Global rank", "Local world size", "Global world size")
    for name, then, now in zip(names, saved, found, strict=True):
        if then != now:
            raise RuntimeError(f"{name} at save time was {then}, but at load time was {now}")


def _on_mesh(group: Group, state: MeshState) -> Group:
    mesh = Mesh(tuple(map(tuple, state[0])), tuple(state[1]))
    if mesh.size != group.size or set(mesh.ranks) != set(group.ranks):
        raise LayoutError(
            "the tensor was made on a mesh of other ranks",
            {"mesh": mesh, "group": f"{group.size} ranks"},
            "load inside load_with_process_group(device_mesh)",
        )
    return group_on_mesh(group, mesh)


def reduce_group(group: Group) -> tuple[Any, ...]:
    """Return what pickle writes of a group."""
    return unpickle_group, (rank_info(group), mesh_state(group), tuple(group.ranks))


for _kind in (SingleRankGroup, TorchGroup, CheckedGroup):
    copyreg.pickle(_kind, reduce_group)
