"""`as_group`: the `Group` of a process group, a DeviceMesh or None."""

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

from shardtensor.comm.backend_support import BackendSupport
from shardtensor.comm.checked import CheckedGroup, are_collectives_checked
from shardtensor.comm.group import Group, NonMemberGroup, SingleRankGroup
from shardtensor.comm.torch_group import TorchGroup
from shardtensor.comm.untraced import untraced
from shardtensor.mesh import Mesh

_groups: dict[Any, Group] = {}  # by process group, which hashes by identity
_mesh_groups: dict[int, tuple[weakref.ref[Any], Group]] = {}  # by id: meshes of two worlds may be equal
_single = SingleRankGroup()
_current: ContextVar[Any] = ContextVar("process group of load_with_process_group", default=None)
simulated: ContextVar[Group | None] = ContextVar("the world in which this thread is a simulated rank", default=None)


@contextmanager
def load_with_process_group(process_group: Any) -> Iterator[Any]:
    """Make `as_group(None)` return the group of `process_group`; tensors unpickled inside get that group."""
    if _current.get() is not None:
        raise RuntimeError("load_with_process_group is already active: leave the first block before the second")
    token = _current.set(process_group)
    try:
        yield process_group
    finally:
        _current.reset(token)


def as_group(where: Any = None) -> Group:
    """Return the `Group` of a process group, a DeviceMesh, or None. Sends nothing; O(1) after the first call.

    None means the first of these that there is: the group of `load_with_process_group`, the ranks of `simulate`, the
    default process group, a group of one rank. A `Group` is returned unchanged.

    For a DeviceMesh of one axis it returns the group of that axis. For more axes it returns a group of all the mesh's
    ranks, whose ``mesh`` has the axes, named as in torch or ``dim_0, dim_1, ...``, and whose ``axis(name)`` is the
    group along one of them. If these ranks are not the whole world, the first call makes a process group, so all of
    them must make it. The group's index is -1 if this process is not a member.

    Raises:
        TypeError: for any other object.
    """
    if where is None:
        where = _current_process_group()
        if where is None:
            return simulated.get() or _single
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
    """Return this process's global rank and the number of ranks; None without a default process group."""
    world = simulated.get()
    if world is not None:
        return world.rank, world.size
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


@untraced("making a group cannot be compiled: make the first sharded tensor outside of the graph")
def _find_group(where: Any) -> Group:
    if isinstance(where, dist.ProcessGroup):
        forget_destroyed()
        group: Group = _torch_group(where) if where.size() > 1 else _single_rank_group(where)
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
        return _non_member_group(dist.get_rank())
    raise TypeError(
        f"a process group, a DeviceMesh or None says which ranks take part; this is a {type(where).__name__}"
    )


def device_mesh_of(group: Group) -> Any:
    """Return the DeviceMesh from which `as_group` made this group, if it still exists, else None."""
    meshes = (mesh() for mesh, known in _mesh_groups.values() if known is group)
    return next((mesh for mesh in meshes if mesh is not None), None)


@lru_cache(maxsize=256)  # ranks may be threads of one process
def _non_member_group(rank: int) -> Group:
    """Return the group of NON_GROUP_MEMBER: the same object each time, so that operations accept its tensors."""
    return NonMemberGroup(rank)


def forget_destroyed() -> None:
    """Drop the references to groups that torch has destroyed, which ends their threads and closes their sockets.

    `as_group` calls it whenever it makes a group.
    """
    for process_group in [known for known in _groups if known not in _world.pg_map]:
        del _groups[process_group]
    for key, (mesh, group) in list(_mesh_groups.items()):
        if mesh() is None or group.process_group not in _world.pg_map:
            del _mesh_groups[key]


def _group_of_mesh(device_mesh: Any) -> Group:
    ranks = device_mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        return NonMemberGroup(dist.get_rank(), ranks)
    if device_mesh.ndim == 1:
        # In a gloo world with GPUs torch makes a second group of the same ranks for a mesh, with NCCL.
        world = as_group(dist.group.WORLD)
        is_world = device_mesh.device_type == world.device_type == "cpu" and ranks == list(world.ranks)
        return world if is_world else as_group(device_mesh.get_group())
    names = device_mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(device_mesh.ndim))
    mesh = Mesh(tuple(zip(names, device_mesh.mesh.shape, strict=True)), ranks)
    group = as_group(dist.group.WORLD).subgroup(ranks)
    axes: dict[tuple[str, ...], Group] = {(name,): as_group(device_mesh.get_group(i)) for i, name in enumerate(names)}
    return group.on_mesh(mesh, axes)


def _torch_group(process_group: Any) -> Group:
    group = TorchGroup(process_group)
    if not are_collectives_checked() or "fake" in dist.get_backend(process_group):  # there are no other processes
        return group
    return CheckedGroup.over(group)


def _single_rank_group(process_group: Any) -> SingleRankGroup:
    support = BackendSupport.of_backends(dist.get_backend_config(process_group), process_group.bound_device_id)
    return SingleRankGroup(dist.get_rank(), process_group, support.device_type)
