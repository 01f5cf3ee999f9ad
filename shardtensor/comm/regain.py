"""Groups in pickles: a rank writes who takes part and its place in the world; a rank of the same place has it back.

Nothing is sent, but that groups of some of the ranks are made anew where the process that reads has none: all their
members read the same things in the same order then.
"""

from __future__ import annotations

import copyreg
from typing import Any

from shardtensor.comm.checked import CheckedGroup
from shardtensor.comm.group import Group, LoneGroup, seen_on
from shardtensor.comm.process_group import as_group, world_place
from shardtensor.comm.torch_group import TorchGroup
from shardtensor.errors import LayoutError
from shardtensor.mesh import Mesh

Place = tuple[int, int, int, int]
Grid = tuple[Any, Any]


def place_of(group: Group) -> Place | None:
    """Rank in the group and in the world, and the sizes of both; None without process groups."""
    world = world_place()
    return None if world is None else (group.index, world[0], group.size, world[1])


def grid_of(group: Group) -> Grid | None:
    """The axes and ranks of the group's mesh."""
    return None if group.mesh is None else (group.mesh.axes, tuple(group.mesh.ranks))


def regained(place: Place | None, grid: Grid | None, ranks: tuple[int, ...] | None = None) -> Group:
    """The group of these ranks, of all without `ranks`, in the world that `as_group(None)` tells of.

    Raises:
        RuntimeError: there is no process group, or this process has another place in it than the one that wrote.
        LayoutError: the ranks are others.
    """
    if place is not None and world_place() is None:
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
        if place is not None:  # before others are waited for
            rank, size = world_place() or (0, 1)
            _check_place((0, place[1], 0, place[3]), (0, rank, 0, size))
        group = group.subgroup(ranks)
    _check_place(place or (0, 0, 1, 1), place_of(group) or (0, 0, 1, 1))
    return group if grid is None or group.mesh is not None else _on_mesh(group, grid)


def _check_place(then: Place, now: Place) -> None:
    names = ("Local rank", "Global rank", "Local world size", "Global world size")
    for name, saved, found in zip(names, then, now, strict=True):
        if saved != found:
            raise RuntimeError(f"{name} at save time was {saved}, but at load time was {found}")


def _on_mesh(group: Group, grid: Grid) -> Group:
    """The group seen as the grid that it was; one object for all that is read of a group and grid."""
    mesh = Mesh(tuple(map(tuple, grid[0])), tuple(grid[1]))
    if mesh.size != group.size or set(mesh.ranks) != set(group.ranks):
        raise LayoutError(
            "the tensor was made on a mesh of other ranks",
            {"mesh": mesh, "group": f"{group.size} ranks"},
            "load inside load_with_process_group(device_mesh)",
        )
    return seen_on(group, mesh)


def reduce(group: Group) -> tuple[Any, ...]:
    """What pickle writes of a group."""
    return regained, (place_of(group), grid_of(group), tuple(group.ranks))


for _kind in (LoneGroup, TorchGroup, CheckedGroup):
    copyreg.pickle(_kind, reduce)  # type: ignore[arg-type]
