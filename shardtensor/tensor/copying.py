"""``copy.copy``, ``copy.deepcopy`` and pickling, ``torch.save`` and ``torch.load``, with ``weights_only=True`` too.

A rank writes its own leaf, the text of the spec, the global shape, and its place in the world; a rank of the same place
reads them back, under `load_with_process_group` or on the default group. Nothing is sent. For ``weights_only`` a name
of the package that needs torch has to be imported, or the package after torch: importing it does not import torch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

import shardtensor
from shardtensor.comm.process_group import MeshState, RankInfo, mesh_state, rank_info, unpickle_group
from shardtensor.errors import LayoutError, RuleError
from shardtensor.layout.bind import bind
from shardtensor.layout.layout import same_boxes
from shardtensor.spec.devices import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec
from shardtensor.spec.nodes import Replicate, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor import placing
from shardtensor.tensor.gradient import gradient_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, view_of, wrap

OWN = frozenset({*ShardedTensor.__annotations__, "_owner"})
"""What a shell is made of; any other attribute is the user's (``_is_param`` is nn.Parameter's)."""


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that users, and nn.Parameter, have set."""
    return {name: value for name, value in vars(tensor).items() if name not in OWN}


def shallow_copy(tensor: ShardedTensor) -> ShardedTensor:
    """Return another ShardedTensor over the same leaf, with the same attributes."""
    twin = view_of(tensor, tensor._local, tensor._layout, tensor._spec)
    vars(twin).update((name, value) for name, value in vars(tensor).items() if name not in ("_owner", "_flat"))
    return twin


def deep_copy(tensor: ShardedTensor, memo: dict[int, Any]) -> ShardedTensor:
    """Return an independent copy on the same ranks: own bytes, own attributes; ties within one deepcopy stay ties.
    As torch does, the gradient comes along for a plain tensor, not for a parameter; hooks do not."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    is_param = getattr(tensor, "_is_param", False)
    local = copy_of_leaf(tensor._local, memo, with_grad=not is_param)
    twin = wrap(local, tensor._layout, tensor._spec, tensor._group)
    twin._placements = copy.deepcopy(tensor._placements, memo)
    memo[id(tensor)] = twin
    if (cached := tensor._grad_shell) is not None and local.grad is not None:
        twin._grad_shell = (local.grad, gradient_of(twin, local.grad))
        memo[id(cached[1])] = twin._grad_shell[1]
    vars(twin).update(copy.deepcopy(attributes_of(tensor), memo))
    return twin


def copy_of_leaf(local: torch.Tensor, memo: dict[int, Any], *, with_grad: bool = True) -> torch.Tensor:
    """Return an independent copy of a local tensor that owns exactly its bytes, whatever it is a view of."""
    if id(local) in memo:
        return memo[id(local)]
    if not local.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
        )
    twin = local.detach().clone(memory_format=torch.preserve_format)
    if isinstance(local, torch.nn.Parameter):
        twin = torch.nn.Parameter(twin, local.requires_grad)
    else:
        twin.requires_grad_(local.requires_grad)
    memo[id(local)] = twin
    if with_grad and local.grad is not None:
        twin.grad = local.grad.detach().clone(memory_format=torch.preserve_format)
    return twin


ShardedTensor.__copy__ = shallow_copy  # type: ignore[attr-defined]
ShardedTensor.__deepcopy__ = deep_copy  # type: ignore[method-assign,assignment]


SAID_AS_TEXT = (Spec, Replicate, ChunkShardingSpec, GridShardingSpec, EnumerableShardingSpec)


def reduce(tensor: ShardedTensor, protocol: int = 2) -> tuple[Any, ...]:
    """What pickle writes. The leaf itself goes in, so that what shares it still does when read back."""
    group, local = tensor._group, tensor._local
    if local.untyped_storage().nbytes() > local.numel() * local.element_size():  # a view: not all of what it views
        local = local.detach().clone().requires_grad_(local.requires_grad)
    where = mesh_state(group), rank_info(group)
    state = (local, _spec_to_write(tensor), tuple(tensor._layout.shape), *where, attributes_of(tensor))
    return shardtensor._rebuild, state


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


def rebuild(
    local: torch.Tensor,
    spec: str | ShardingSpec,
    shape: tuple[int, ...],
    mesh: MeshState | None,
    place: RankInfo | None,
    attributes: dict[str, Any],
) -> ShardedTensor:
    """Make the tensor that `reduce` wrote, in a process with the same place in a process group."""
    group = unpickle_group(place, mesh)
    bound = as_spec(spec)
    layout = bind(bound, tuple(shape), placing.mesh_of(group))
    want = layout.local_shape(group.rank)
    if tuple(local.shape) != want:
        raise LayoutError(
            "a pickled shard does not have the shape that its spec gives this rank",
            {"rank": group.rank, "found": tuple(local.shape), "needed": want},
        )
    written = placing.placement_of(bound, group.rank)
    if written is not None and written.device_type != local.device.type:  # map_location
        bound = placing.moved(bound, layout, local.device)  # type: ignore[assignment]
    tensor = wrap(local, layout, bound, group)
    vars(tensor).update(attributes)
    return tensor


ShardedTensor.__reduce_ex__ = reduce  # type: ignore[method-assign,assignment]
torch.serialization.add_safe_globals([shardtensor._rebuild])
