"""``copy.copy`` and ``copy.deepcopy`` of sharded tensors. Neither sends anything."""

from __future__ import annotations

import copy
from typing import Any

import torch

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

    As torch does, the gradient comes along for a plain tensor, not for a parameter; hooks do not.

    Raises:
        RuntimeError: the tensor is a result that requires a gradient, as from torch.
    """
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
