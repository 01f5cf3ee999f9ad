"""From what torch users hold (a process group, a DeviceMesh, nothing) to a `Group`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from shardtensor.comm.checked import CheckedGroup, are_collectives_checked
from shardtensor.comm.group import Group, LoneGroup
from shardtensor.comm.torch_group import OutsideGroup, TorchGroup
from shardtensor.comm.untraced import untraced
from shardtensor.comm.wire import Wire
from shardtensor.mesh import Mesh

_groups: dict[Any, Group] = {}  # by process group, which hashes by identity
_mesh_groups: dict[int, tuple[weakref.ref[Any], Group]] = {}  # by id: meshes of two worlds may be equal
_alone = LoneGroup()
_current: ContextVar[Any] = ContextVar("process group of load_with_process_group", default=None)
simulated: ContextVar[Group | None] = ContextVar("the world that this thread is a simulated rank of", default=None)


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Make `process_group` stand for None in `as_group`, so that tensors unpickled inside belong to it."""
    if _current.get() is not None:
        raise RuntimeError("load_with_process_group is already active: leave the first block before the second")
    token = _current.set(process_group)
    try:
        yield process_group
    finally:
        _current.reset(token)


def as_group(where: Any = None) -> Group:
    """Return the `Group` of a process group, a DeviceMesh, or None. Sends nothing; O(1) after the first call.

    A DeviceMesh of one axis gives that axis's group; of more, a group of all its ranks whose ``mesh`` has the axes,
    named as in torch or ``dim_0, dim_1, ...``, and whose ``axis(name)`` gives the group along one of them. Where those
    ranks are not the whole world, the first call makes a process group, so all of them make it.

    Args:
        where: None means the group of `load_with_process_group` inside of it, then the ranks of `simulate` inside
            of that, then the default group, and without any a world of one. A `Group` is returned as it is.

    Returns:
        the group; one of index -1 where this process is not a member.

    Raises:
        TypeError: for any other object.
    """
    if where is None:
        where = _current_process_group()
        if where is None:
            return simulated.get() or _alone
    found = _groups.get(where) if isinstance(where, dist.ProcessGroup) else None
    return found if found is not None else _find_group(where)


def _current_process_group() -> Any:
    process_group = _current.get()
    if process_group is None and (upstream := sys.modules.get("torch.distributed._shard.api")) is not None:
        process_group = getattr(upstream, "_CURRENT_PROCESS_GROUP", None)
    if process_group is None and simulated.get() is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    return process_group


def world_place() -> tuple[int, int] | None:
    """This process's global rank and the number of ranks; None where no default group exists."""
    world = simulated.get()
    if world is not None:
        return world.rank, world.size
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


@untraced("a group is looked up, or made, once: make the first sharded tensor outside of the graph")
def _find_group(where: Any) -> Group:
    if isinstance(where, dist.ProcessGroup):
        forget_destroyed()
        group: Group = _connected(where) if where.size() > 1 else _alone_in(where)
        _groups[where] = group
        return group
    if isinstance(where, dist.DeviceMesh):
        known = _mesh_groups.get(id(where))
        if known is not None and known[0]() is where:
            return known[1]
        forget_destroyed()
        group = _group_of_mesh(where)
        _mesh_groups[id(where)] = (weakref.ref(where), group)
        return group
    if isinstance(where, Group):
        return where
    if where is dist.GroupMember.NON_GROUP_MEMBER or where == dist.GroupMember.NON_GROUP_MEMBER:
        return _outside(dist.get_rank())
    raise TypeError(
        f"a process group, a DeviceMesh or None says which ranks take part; this is a {type(where).__name__}"
    )


def device_mesh_of(group: Group) -> Any:
    """The DeviceMesh that `as_group` was given for this group, if it still exists, else None."""
    meshes = (mesh() for mesh, known in _mesh_groups.values() if known is group)
    return next((mesh for mesh in meshes if mesh is not None), None)


@lru_cache(maxsize=256)  # there may be a thread for each rank
def _outside(rank: int) -> Group:
    """The one group that stands for all that torch calls NON_GROUP_MEMBER: tensors on it can be put side by side."""
    return OutsideGroup(rank)


def forget_destroyed() -> None:
    """Let go of the groups that torch has destroyed, which ends their threads and closes their sockets.

    Happens by itself whenever a new group is met.
    """
    for process_group in [known for known in _groups if known not in _world.pg_map]:
        del _groups[process_group]
    for key, (mesh, group) in list(_mesh_groups.items()):
        if mesh() is None or group.process_group not in _world.pg_map:
            del _mesh_groups[key]


def _group_of_mesh(device_mesh: Any) -> Group:
    ranks = device_mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        return OutsideGroup(dist.get_rank(), ranks)
    if device_mesh.ndim == 1:
        # In a gloo world with GPUs torch makes a second group of the same ranks for a mesh, for the sake of NCCL.
        world = as_group(dist.group.WORLD)
        is_world = device_mesh.device_type == world.device_type == "cpu" and ranks == list(world.ranks)
        return world if is_world else as_group(device_mesh.get_group())
    names = device_mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(device_mesh.ndim))
    mesh = Mesh(tuple(zip(names, device_mesh.mesh.shape, strict=True)), ranks)
    whole = as_group(dist.group.WORLD).subgroup(ranks)
    axes: dict[tuple[str, ...], Group] = {(name,): as_group(device_mesh.get_group(i)) for i, name in enumerate(names)}
    return whole.on_mesh(mesh, axes)


def _connected(process_group: Any) -> Group:
    group = TorchGroup(process_group)
    if not are_collectives_checked() or dist.get_backend(process_group) == "fake":  # where ranks are only pretended
        return group
    return CheckedGroup.over(group)


def _alone_in(process_group: Any) -> LoneGroup:
    wire = Wire.of_backends(dist.get_backend_config(process_group), process_group.bound_device_id)
    return LoneGroup(dist.get_rank(), process_group, wire.device_type)
