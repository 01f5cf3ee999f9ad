"""Pickling: ``pickle``, ``torch.save`` and ``torch.load``, with ``weights_only=True`` too.

A rank writes its own leaf, the text of the spec, the global shape, and its place in the world; a rank of the same place
reads them back, under `load_with_process_group` or on the default group. Nothing is sent, but that a tensor made with
``init_rrefs=True`` is shown over RPC again, as torch does.
"""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group, world_place
from shardtensor.errors import LayoutError, RuleError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import Layout, same_boxes
from shardtensor.mesh import Mesh
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec
from shardtensor.spec.nodes import Replicate, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor import placing
from shardtensor.tensor.copying import attributes_of
from shardtensor.tensor.remote import share
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

SAID_AS_TEXT = (Spec, Replicate, ChunkShardingSpec, GridShardingSpec, EnumerableShardingSpec)


def reduce(tensor: ShardedTensor, protocol: int = 2) -> tuple[Any, ...]:
    """What pickle writes. The leaf itself goes in, so that what shares it still does when read back.

    Raises:
        RuleError: the tensor is still to be reduced.
    """
    group, local = tensor._group, tensor._local
    if local.untyped_storage().nbytes() > local.numel() * local.element_size():  # a view: not all of what it views
        local = local.detach().clone().requires_grad_(local.requires_grad)
    mesh = None if group.mesh is None else (group.mesh.axes, tuple(group.mesh.ranks))
    state = (local, _spec_to_write(tensor), tuple(tensor._layout.shape), mesh, _place(group), attributes_of(tensor))
    return rebuild, state if tensor._remote is None else (*state, True)


def _spec_to_write(tensor: ShardedTensor) -> str | ShardingSpec:
    """The spec's text, or a user's own spec as it is; one that gives this very layout back."""
    mesh = placing.mesh_of(tensor._group)
    for spec in (tensor.sharding_spec(), placing.spec_of(tensor._layout, tensor.device)):
        try:
            layout = bind(spec, tensor._layout.shape, mesh)
        except LayoutError:  # names of dims, say, which only the module knew
            continue
        if same_boxes(layout, tensor._layout):
            return str(spec) if type(spec) in SAID_AS_TEXT else spec
    raise RuleError(
        "no spec says how this tensor lies, so it cannot be pickled",
        {"layout": str(tensor._layout)},
        "pickle a leaf made from a spec, or full_tensor()",
    )


def _place(group: Group) -> tuple[int, int, int, int] | None:
    """Rank in the group and in the world, and the sizes of both; None without process groups."""
    world = world_place()
    return None if world is None else (group.index, world[0], group.size, world[1])


def rebuild(
    local: torch.Tensor,
    spec: str | ShardingSpec,
    shape: tuple[int, ...],
    mesh: tuple[Any, Any] | None,
    place: tuple[int, int, int, int] | None,
    attributes: dict[str, Any],
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Make the tensor that `reduce` wrote.

    Raises:
        RuntimeError: there is no process group, or this process has another place in it than the one that wrote.
    """
    if place is not None and world_place() is None:
        raise RuntimeError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor'
        )
    group = as_group(None)
    _check_place(place or (0, 0, 1, 1), _place(group) or (0, 0, 1, 1))
    if mesh is not None and group.mesh is None:
        group = _on_mesh(group, Mesh(tuple(map(tuple, mesh[0])), tuple(mesh[1])))
    bound = as_spec(spec)
    layout = bind(bound, tuple(shape), placing.mesh_of(group))
    _check_shape(local, layout, group)
    written = placing.placement_of(bound, group.rank)
    if written is not None and written.device_type != local.device.type:  # map_location
        bound = placing.moved(bound, local.device.type)  # type: ignore[assignment]
    tensor = wrap(local, layout, bound, group)
    vars(tensor).update(attributes)
    return share(tensor) if init_rrefs else tensor


def _check_place(then: tuple[int, ...], now: tuple[int, ...]) -> None:
    names = ("Local rank", "Global rank", "Local world size", "Global world size")
    for name, saved, found in zip(names, then, now, strict=True):
        if saved != found:
            raise RuntimeError(f"{name} at save time was {saved}, but at load time was {found}")


def _check_shape(local: torch.Tensor, layout: Layout, group: Group) -> None:
    want = layout.local_shape(group.rank)
    if tuple(local.shape) != want:
        raise LayoutError(
            "a pickled shard does not have the shape that its spec gives this rank",
            {"rank": group.rank, "found": tuple(local.shape), "needed": want},
        )


def _on_mesh(group: Group, mesh: Mesh) -> Group:
    """The group seen as the grid that the tensor was made on; one object for all tensors of a group and grid."""
    if mesh.size != group.size or set(mesh.ranks) != set(group.ranks):
        raise LayoutError(
            "the tensor was made on a mesh of other ranks",
            {"mesh": mesh, "group": f"{group.size} ranks"},
            "load inside load_with_process_group(device_mesh)",
        )
    seen_as = vars(group).setdefault("_seen_as", {})
    if mesh not in seen_as:
        seen_as[mesh] = group.on_mesh(mesh, {})
    return seen_as[mesh]


ShardedTensor.__reduce_ex__ = reduce  # type: ignore[method-assign,assignment]
torch.serialization.add_safe_globals([rebuild])
