"""`as_group`: the `Group` of a process group, a DeviceMesh or None; and pickles of groups."""

from __future__ import annotations

import atexit
import copyreg
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
from shardtensor.comm.group import Group, NonMemberGroup, SingleRankGroup, group_on_mesh
from shardtensor.comm.torch_group import TorchGroup
from shardtensor.comm.untraced import untraced
from shardtensor.errors import LayoutError, RuleError
from shardtensor.mesh import Mesh
from shardtensor.spec.placement import Placement

_seen: dict[str, int] = {}


def rpc_is_up() -> bool:
    """Whether this process has called ``torch.distributed.rpc.init_rpc``."""
    from torch.distributed import rpc

    return rpc.is_available() and rpc._is_current_rpc_agent_set()


def rank_of(placement: Placement) -> int | None:
    """Return the global rank that a placement names, as a number or by its RPC worker; None if it names neither."""
    name = placement.worker_name()
    if name is None:
        return placement.rank()
    from torch.distributed import rpc

    if not rpc_is_up():
        raise RuleError(
            f"RPC framework needs to be initialized for using worker names: {name}",
            {"placement": placement},
            ["call torch.distributed.rpc.init_rpc first", 'name the rank instead, as in "rank:0/cpu"'],
        )
    try:
        rank: int = rpc.get_worker_info(name).id
    except RuntimeError:
        raise LayoutError(
            f"Invalid worker name: {name}", {"placement": placement}, "use a name that a rank gave to init_rpc"
        ) from None
    _seen[name] = rank
    return rank


def rank_seen(placement: Placement) -> int | None:
    """Return the rank that `rank_of` last returned for the placement's worker, even if RPC has been shut down since."""

    return placement.rank() if placement.worker is None else _seen.get(placement.worker)


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

    None means the first of these that exists: the group of `load_with_process_group`, the ranks of `simulate`, the
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
        config = dist.get_backend_config(where)
        group: Group
        if where.size() == 1:
            support = BackendSupport.of_backends(config, where.bound_device_id)
            group = SingleRankGroup(dist.get_rank(), where, support.device_type)
        elif are_collectives_checked() and "fake" not in dist.get_backend(where):  # there are other processes
            group = CheckedGroup.over(TorchGroup(where))
        else:
            group = TorchGroup(where)
        _groups[where] = group
        return group
    if isinstance(where, dist.DeviceMesh):
        cached = _mesh_groups.get(id(where))
        if cached is not None and cached[0]() is where:
            return cached[1]
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
    meshes = (mesh() for mesh, cached in _mesh_groups.values() if cached is group)
    return next((mesh for mesh in meshes if mesh is not None), None)


@lru_cache(maxsize=256)  # ranks may be threads of one process
def _non_member_group(rank: int) -> Group:
    """Return the group of NON_GROUP_MEMBER: the same object each time, so that operations accept its tensors."""
    return NonMemberGroup(rank)


def forget_destroyed() -> None:
    """Drop the references to groups that torch has destroyed, which ends their threads and closes their sockets.
    `as_group` calls it whenever it makes a group."""
    for process_group in [pg for pg in _groups if pg not in _world.pg_map]:
        del _groups[process_group]
    for key, (mesh, group) in list(_mesh_groups.items()):
        if mesh() is None or group.process_group not in _world.pg_map:
            del _mesh_groups[key]


def _release_destroyed() -> None:
    """Drop the process groups that were destroyed, also those of groups that tensors still refer to.

    gloo ends its threads when the last reference is gone. After the interpreter has ended, it aborts the process.
    """
    groups = [*_groups.values(), *(group for _, group in _mesh_groups.values())]
    forget_destroyed()
    for group in groups:
        if group.process_group is not None and group.process_group not in _world.pg_map:
            group.process_group = None


atexit.register(_release_destroyed)

_live: weakref.WeakSet[Any] = weakref.WeakSet()
_is_watching = False


def release_before_groups(holder: Any) -> None:
    """Call ``holder.release()`` before any process group is shut down, and before the process ends.

    NCCL hangs when it destroys a communicator that a graph still uses. All functions that destroy a group call
    `ProcessGroup.shutdown`, which the first call of this function wraps.
    """
    global _is_watching
    _live.add(holder)
    if _is_watching:
        return
    _is_watching = True
    atexit.register(release_all)
    shut_down = dist.ProcessGroup.shutdown

    def shutdown(self: dist.ProcessGroup) -> None:
        release_all()
        shut_down(self)

    dist.ProcessGroup.shutdown = shutdown  # type: ignore[method-assign]


def release_all() -> None:
    """Call ``release`` of every holder that still exists."""
    for holder in list(_live):
        holder.release()


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

    If this process does not have the subgroup, it is made: its members must all read the same pickles in one order.
    Raises if the ranks or the sizes of the group and the world differ from those of the process that wrote.
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
    if sorted(mesh.ranks) != sorted(group.ranks):  # as many ranks, and the same
        raise LayoutError(
            "the tensor was made on a mesh of other ranks",
            {"mesh": mesh, "group": f"{group.size} ranks"},
            "load inside load_with_process_group(device_mesh)",
        )
    return group_on_mesh(group, mesh)


def reduce_group(group: Group) -> tuple[Any, ...]:
    """Return the function and the arguments that pickle writes for a group."""
    return unpickle_group, (rank_info(group), mesh_state(group), tuple(group.ranks))


for _kind in (SingleRankGroup, TorchGroup, CheckedGroup):
    copyreg.pickle(_kind, reduce_group)
