"""Other contents for the tensor objects of a module, and real memory for those on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from shardtensor.errors import RuleError
from shardtensor.tensor.copying import attributes_of
from shardtensor.tensor.gradient import give_hooks, keep_grad_dtype, take_hooks
from shardtensor.tensor.placing import moved, placement_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

Home = tuple[nn.Module, str]
"""A module, and the name under which it owns a tensor."""


def become(tensor: torch.Tensor, shell: torch.Tensor) -> None:
    """Turn the object `tensor` into `shell`, for all who hold it; it keeps what users set on it.

    That is its attributes, its ``grad_dtype`` and, from a plain tensor, its hooks.

    `shell` must not be used afterwards: it is then the old `tensor`.

    Raises:
        RuleError: the object cannot be changed: a live autograd graph or a weak reference holds on to it.
    """
    vars(shell).update(attributes_of(tensor))
    if isinstance(tensor, nn.Parameter):
        shell._is_param = True
    if isinstance(tensor, ShardedTensor) and isinstance(shell, ShardedTensor):
        shell._flat, shell._unit, shell.__class__ = tensor._flat, tensor._unit, type(tensor)
        shell._tell_flat()
    keep_grad_dtype(tensor, shell)
    tensor.grad = None
    hooks = None if isinstance(tensor, ShardedTensor) else take_hooks(tensor)
    try:
        torch.utils.swap_tensors(tensor, shell)
    except RuntimeError as error:
        raise cannot_change("the parameter", tensor, error) from error
    if hooks is not None:
        give_hooks(tensor, hooks)


def cannot_change(name: str, tensor: torch.Tensor, error: RuntimeError) -> RuleError:
    """The refusal to shard a tensor of which torch says that something else needs it as it is."""
    return RuleError(
        f"{name} cannot be sharded now: something holds on to its old self",
        {"torch says": str(error).splitlines()[0], "weak references": len(weakref.getweakrefs(tensor))},
        "shard before the first forward, or drop what holds it: results of one, compiled modules, weak references",
    )


def with_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor like `tensor` that has memory, of any content, on `device`: this rank's part of a sharded one."""
    if not isinstance(tensor, ShardedTensor):
        return _empty_twin(tensor, device)
    spec = tensor._spec
    placement = None if spec is None else placement_of(spec, tensor._group.rank)
    if placement is not None and placement.device_type != device.type:
        spec = moved(spec, tensor._layout, device)
    return wrap(_empty_twin(tensor._local, device), tensor._layout, spec, tensor._group)


def _empty_twin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    memory = torch.empty_like(tensor.detach(), device=device)
    return torch.Tensor._make_subclass(type(tensor), memory, tensor.requires_grad)


def put_in_place(tensor: torch.Tensor, twin: torch.Tensor, homes: Iterable[Home]) -> torch.Tensor:
    """Put `twin` in the place of `tensor` in the modules that own it; return what they have now.

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
