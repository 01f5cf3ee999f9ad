"""``load_state_dict`` of modules that were sharded on the meta device: loading gives them their memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardtensor.comm.group import Group
from shardtensor.parallel.memory import put_in_place, with_memory
from shardtensor.tensor.placing import device_for, own_device
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap


def load_keeps_layouts(owner: nn.Module, group: Group) -> RemovableHandle | None:
    """Let a load into the tensors that a module itself owns fill them where they are on the meta device.

    A load that copies gives each tensor on the meta device its memory, this rank's part, when its value comes. One that
    assigns cuts whole values, and moves sharded ones, to the layout that the module's tensor has, so that the module
    stays sharded; dtype and device are those of the value, as torch has it. Values may be whole or sharded.

    Returns:
        What takes it off again; None where the module does so already.
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
    for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
        value = state_dict.get(prefix + name)
        if tensor is None or not isinstance(value, torch.Tensor) or value.shape != tensor.shape or value.is_meta:
            continue  # the rest is torch's to say
        if assigns and isinstance(tensor, ShardedTensor):
            state_dict[prefix + name] = laid_out_as(value, tensor)
        elif tensor.is_meta and not assigns:
            put_in_place(tensor, with_memory(tensor, _device(tensor, value.device, kind)), [(owner, name)])


def _device(tensor: torch.Tensor, of_value: torch.device, kind: str | None) -> torch.device:
    if isinstance(tensor, ShardedTensor):
        return device_for(tensor.sharding_spec(), tensor._group, of_value)
    return of_value if kind is None or of_value.type != "cpu" else own_device(kind)


def laid_out_as(value: torch.Tensor, tensor: ShardedTensor) -> torch.Tensor:
    """`value`, whole or sharded, in the layout of `tensor`: itself where it has that, else a copy of this rank's part.

    Collective where a sharded value has another layout.
    """
    if isinstance(value, ShardedTensor) and value._layout == tensor._layout:
        return value
    with torch.no_grad():
        local = local_as(value.detach(), tensor._layout, tensor._group)
    local = local.clone(memory_format=torch.contiguous_format)  # a part of the whole would keep the whole in memory
    return wrap(local, tensor._layout, tensor._spec, tensor._group)
