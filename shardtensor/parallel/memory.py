"""Real memory for tensors on the meta device: a twin of this rank's part, and the twin in the tensor's place."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from shardtensor.parallel.parameter import become
from shardtensor.tensor.placing import moved, placement_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

Home = tuple[nn.Module, str]
"""A module, and the name under which it owns a tensor."""


def with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor like `tensor` that has memory, of any content, on `device`: this rank's part of a sharded one."""
    if not isinstance(tensor, ShardedTensor):
        return _empty_twin(tensor, device)
    spec = tensor._spec
    placement = None if spec is None else placement_of(spec, tensor._group.rank)
    if placement is not None and placement.device_type != device.type:
        spec = moved(spec, device.type)
    return wrap(_empty_twin(tensor._local, device), tensor._layout, spec, tensor._group)


def _empty_twin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor.detach(), device=device)
    return torch.Tensor._make_subclass(type(tensor), memory, tensor.requires_grad)


def put_in_place(tensor: torch.Tensor, twin: torch.Tensor, homes: Iterable[Home]) -> torch.Tensor:
    """Let the modules that own `tensor` have `twin` there, and return what they have now.

    The object stays, so names, ties and optimizers do. One with weak references (an LSTM keeps some) cannot be changed:
    then its modules get the twin itself, as from ``Module.to_empty``.
    """
    if not weakref.getweakrefs(tensor):
        become(tensor, twin)
        return tensor
    made = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    for owner, name in homes:
        setattr(owner, name, made)
    return made
