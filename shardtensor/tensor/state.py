"""State dicts of whole tensors, for programs without sharding.

``torch.distributed.checkpoint.state_dict`` calls no method of a tensor, so this module extends its functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardtensor.comm.process_group import world_place
from shardtensor.imports import when_imported
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap
from shardtensor.tensor.trees import map_tensors


@torch.no_grad()
def full_state_dict(
    source: nn.Module | Mapping[str, Any], *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """Return the state dict that the model would have without sharding: every tensor whole and plain.

    All ranks call it, since each sharded tensor is gathered, one after the other; nothing else is sent. The result goes
    to ``torch.save``, ``safetensors.torch.save_file``, ``model.save_pretrained(folder, state_dict=...)``; a sharded
    model takes it back by ``load_state_dict``.

    Args:
        source: a module, or a state dict, such as ``optim_state_dict(model, optimizer)`` or a dict of several. Dicts,
            lists and tuples inside of it are followed.
        rank0_only: gather to rank 0 of the world alone. The others get an empty dict, and hold no whole tensor.
        cpu_offload: put the tensors on the CPU, each as soon as it is whole, so that a GPU holds one at a time.

    Returns:
        the same keys. A tensor under two keys (tied weights) is gathered once and appears under both. As in
        ``state_dict()``, a tensor that was whole already shares memory with the model.

    Raises:
        RuntimeError: this rank is not a member of the group of a tensor that it has to gather.

    Example:
        >>> import torch, shardtensor as st
        >>> model = torch.nn.Linear(4, 2)
        >>> st.shard_parameter(model, "weight", "[tp, -]")
        >>> {name: type(x).__name__ for name, x in st.full_state_dict(model, rank0_only=True, cpu_offload=True).items()}
        {'weight': 'Tensor', 'bias': 'Tensor'}
    """
    done: dict[int, tuple[torch.Tensor, Any]] = {}  # by id, with the tensor itself so that no other gets that id

    def whole(value: torch.Tensor) -> Any:
        if id(value) not in done:
            done[id(value)] = value, _gathered(value, rank0_only, cpu_offload)
        return done[id(value)][1]

    found = map_tensors(whole, dict(source.state_dict(keep_vars=True) if isinstance(source, nn.Module) else source))
    return {} if rank0_only and _rank() else found


def _gathered(tensor: torch.Tensor, rank0_only: bool, cpu_offload: bool) -> torch.Tensor | None:
    """Return the whole tensor; with `rank0_only`, None on all ranks but 0."""
    rank = _rank()
    if isinstance(tensor, ShardedTensor) and rank0_only and tensor._group.size != 1:
        ranks, out = tensor._group.ranks, None
        if rank == 0 and 0 not in ranks:
            return tensor.full_tensor()  # raises: this rank is no member
        if rank == 0:
            out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if cpu_offload else tensor.device)
        if 0 in ranks:  # else no rank of the group keeps it
            tensor.gather(ranks.index(0), out)
        return out
    if is_dtensor(tensor) or isinstance(tensor, ShardedTensor):
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    if rank0_only and rank:
        return None
    return tensor.detach().cpu() if cpu_offload else tensor.detach()


def _rank() -> int:
    """Return this process's rank in the world; 0 without one."""
    place = world_place()
    return 0 if place is None else place[0]


def _extend(module: ModuleType) -> None:
    """Make torch's functions for state dicts gather ShardedTensors, and keep their layouts when a state is set."""
    visit, broadcast, distribute = module._iterate_state_dict, module._broadcast_tensors, module._distribute_state_dict

    @functools.wraps(visit)
    def visit_sharded(value: Any, sharded_tensor_func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        # copies to pinned memory and comparisons also call this; they keep the tensors as they are
        if isinstance(value, ShardedTensor) and sharded_tensor_func.__qualname__.startswith("_gather_state_dict."):
            with torch.no_grad():
                value = _gathered(value, options.get("ranks_only") == (0,), options.get("cpu_offload", False))
        return visit(value, sharded_tensor_func, *args, **options)

    @functools.wraps(broadcast)
    def broadcast_sharded(full: Any, local: dict[str, Any], keys: list[str], *args: Any, **options: Any) -> None:
        sharded = {key: local[key] for key in keys if isinstance(local.get(key), ShardedTensor)}
        broadcast(full, local, keys, *args, **options)  # puts whole tensors into `local`
        local.update({key: _filled(x, local[key]) for key, x in sharded.items()})

    @functools.wraps(distribute)
    def distribute_sharded(
        full: dict[str, Any], local: dict[str, Any], device: Any, *args: Any, **options: Any
    ) -> None:
        sharded = {
            key: x for key, x in local.items() if isinstance(x, ShardedTensor) and torch.is_tensor(full.get(key))
        }
        rest = {key: x for key, x in full.items() if key not in sharded}
        distribute(rest, local, device, *args, **options)
        local.update({key: _filled(x, full[key].detach(), device) for key, x in sharded.items()})

    module._iterate_state_dict = visit_sharded  # type: ignore[attr-defined]
    module._broadcast_tensors = broadcast_sharded  # type: ignore[attr-defined]
    module._distribute_state_dict = distribute_sharded  # type: ignore[attr-defined]
    user = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if user is not None:  # it was imported before, and holds this one by name
        user._distribute_state_dict = distribute_sharded  # type: ignore[attr-defined]


@torch.no_grad()
def _filled(tensor: ShardedTensor, value: torch.Tensor, device: Any = None) -> ShardedTensor:
    """Copy a value into a tensor and return it; for a meta tensor return a new one on `device`."""
    if value.shape != tensor.shape:
        return value  # type: ignore[return-value]  # `load_state_dict` raises for it, with all the others
    part = local_as(value, tensor._layout, tensor._group)
    if tensor.is_meta:  # torch assigns it to the module
        return wrap(part.to(device, copy=True), tensor._layout, tensor._spec, tensor._group)
    tensor._local.copy_(part)
    return tensor


when_imported("torch.distributed._state_dict_utils", _extend)
