"""Replace the contents of a module's tensor objects, and allocate those on the meta device, also during a load."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardtensor.comm.group import Group
from shardtensor.comm.primitives import becomes_true
from shardtensor.errors import RuleError
from shardtensor.tensor.convert import attributes_of
from shardtensor.tensor.gradient import give_hooks, keep_grad_dtype, take_hooks
from shardtensor.tensor.placing import device_for, moved, own_device, placement_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap

Location = tuple[nn.Module, str]
"""A module, and the name under which it owns a tensor."""


def become(tensor: torch.Tensor, wrapper: torch.Tensor) -> None:
    """Turn the object `tensor` into `wrapper`, wherever it is held; it keeps what users set on it.

    That is its attributes, its ``grad_dtype`` and, from a plain tensor, its hooks.

    `wrapper` must not be used afterwards: it is then the old `tensor`.

    Raises:
        RuleError: the object cannot be changed: a live autograd graph or a weak reference refers to it.
    """
    vars(wrapper).update(attributes_of(tensor))
    if isinstance(tensor, nn.Parameter):
        wrapper._is_param = True
    if isinstance(tensor, ShardedTensor) and isinstance(wrapper, ShardedTensor):
        wrapper._param_group, wrapper._unit, wrapper.__class__ = tensor._param_group, tensor._unit, type(tensor)
        wrapper._record_change()
    keep_grad_dtype(tensor, wrapper)
    tensor.grad = None
    hooks = None if isinstance(tensor, ShardedTensor) else take_hooks(tensor)
    swap("the parameter", tensor, wrapper)
    if hooks is not None:
        give_hooks(tensor, hooks)


def swap(name: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the contents of two tensor objects; `name` names the first one in the error.

    Raises:
        RuleError: a live autograd graph or a weak reference refers to it. Nothing has changed.
    """
    faults: list[RuntimeError] = []

    def is_swapped() -> bool:
        try:
            torch.utils.swap_tensors(tensor, other)
        except RuntimeError as error:
            faults[:] = [error]
            return False
        return True

    count = len(weakref.getweakrefs(tensor))
    if not becomes_true(is_swapped, limit_s=0.0 if count else 1.0):
        raise RuleError(
            f"{name} cannot be sharded now: something else refers to it",
            {"torch": str(faults[0]).splitlines()[0], "weak references": count},
            "shard before the first forward, or drop its results, compiled modules and weak references",
        ) from faults[0]


def with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor like `tensor` that has memory, of any content, on `device`: this rank's part of a sharded one."""
    if not isinstance(tensor, ShardedTensor):
        return _empty_copy(tensor, device)
    spec = tensor._spec
    placement = None if spec is None else placement_of(spec, tensor._group.rank)
    if placement is not None and placement.device_type != device.type:
        spec = moved(spec, tensor._layout, device)
    return wrap(_empty_copy(tensor._local, device), tensor._layout, spec, tensor._group)


def _empty_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor.detach(), device=device)
    return torch.Tensor._make_subclass(type(tensor), memory, tensor.requires_grad)


def put_in_place(tensor: torch.Tensor, copied: torch.Tensor, locations: Iterable[Location]) -> torch.Tensor:
    """Replace `tensor` by `copied` in the modules that own it; return the tensor that they hold now.

    The object stays, so names, ties and optimizers stay. One with weak references (an LSTM keeps some) cannot be
    changed: then its modules get `copied` itself, as from ``Module.to_empty``.
    """
    if not weakref.getweakrefs(tensor):
        become(tensor, copied)
        return tensor
    made = nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    for owner, name in locations:
        setattr(owner, name, made)
    return made


def owned(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a module itself owns, and their names."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def load_keeps_layouts(owner: nn.Module, group: Group) -> RemovableHandle | None:
    """Register a hook so that a load fills the meta tensors that a module itself owns.

    A load that copies allocates each meta tensor that has a value, as this rank's part. One that assigns shards whole
    values, and redistributes sharded ones, to the layout of the module's tensor, so that the module stays sharded;
    dtype and device are those of the value, as in torch. Values may be whole or sharded.

    Returns:
        The handle that removes the hook; None if the module has the hook already.
    """
    hooks = (getattr(wrapped, "hook", None) for wrapped in owner._load_state_dict_pre_hooks.values())
    if any(isinstance(hook, partial) and hook.func is _before_load for hook in hooks):
        return None
    kind = "cuda" if group.device_type == "cuda" else None
    return owner.register_load_state_dict_pre_hook(partial(_before_load, kind))


def _before_load(
    kind: str | None,
    owner: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    *_: Any,
) -> None:
    assigns = local_metadata.get("assign_to_params_buffers", False)
    for name, tensor in list(owned(owner)):
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or value.is_meta:
            continue  # torch handles the rest
        if assigns and isinstance(tensor, ShardedTensor):
            state_dict[prefix + name] = laid_out_as(value, tensor)
        elif tensor.is_meta and not assigns:
            put_in_place(tensor, with_memory(tensor, _device(tensor, value.device, kind)), [(owner, name)])


def _device(tensor: torch.Tensor, of_value: torch.device, kind: str | None) -> torch.device:
    if isinstance(tensor, ShardedTensor):
        return device_for(tensor.sharding_spec(), tensor._group, of_value)
    return of_value if kind is None or of_value.type != "cpu" else own_device(kind)


def laid_out_as(value: torch.Tensor, tensor: ShardedTensor) -> torch.Tensor:
    """Return `value`, whole or sharded, in the layout of `tensor`: itself if it has that, else a copy of its part.

    Collective if a sharded value has another layout.
    """
    if isinstance(value, ShardedTensor) and value._layout == tensor._layout:
        return value
    with torch.no_grad():
        local = local_as(value.detach(), tensor._layout, tensor._group)
    local = local.clone(memory_format=torch.contiguous_format)  # a part of the whole would keep the whole in memory
    return wrap(local, tensor._layout, tensor._spec, tensor._group)
