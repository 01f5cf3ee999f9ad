"""Hooks on sharded tensors: they run on every rank and get ShardedTensors.

They live on the leaf, as its gradient does, and must not keep the ShardedTensor alive: Python's collector does not see
through a leaf's post-accumulate hooks, so such a cycle would never be freed. Nor may they hold a weak reference to it:
torch refuses to swap a tensor that has one. So the ShardedTensor owns a small `Owner` that knows it, a cycle that the
collector does see, and the hook has a weak reference to that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.gradient import gradient_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap


@implements(torch.Tensor.register_hook)
def register_hook(tensor: ShardedTensor, hook: Callable[[ShardedTensor], torch.Tensor | None]) -> Any:
    """Call ``hook(gradient)``, a ShardedTensor, whenever the gradient is computed; what it returns replaces it."""
    # The hook must not keep the tensor alive, so it knows it by a local tensor without memory.
    stand_in = torch.empty(tensor._local.shape, device="meta")
    like = wrap(stand_in, tensor._layout, tensor._spec, tensor._group)

    def on_leaf(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # torch calls where the graph could have brought a gradient and did not, too
            return None
        shown = gradient_of(like, grad)
        changed = hook(shown)
        return None if changed is None else local_as(changed, shown._layout, shown._group)

    return tensor._local.register_hook(on_leaf)


class Owner:
    """Finds the ShardedTensor that a leaf belongs to, as long as it lives."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: ShardedTensor) -> None:
        self.tensor = tensor


@implements(torch.Tensor.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(tensor: ShardedTensor, hook: Callable[[ShardedTensor], None]) -> Any:
    """Call ``hook(tensor)``, with this very object, after its gradient has been accumulated."""
    owner = vars(tensor).setdefault("_owner", Owner(tensor))
    find = weakref.ref(owner)

    def on_leaf(_: torch.Tensor) -> None:
        owner = find()
        if owner is not None:
            hook(owner.tensor)

    return tensor._local.register_post_accumulate_grad_hook(on_leaf)


@implements(torch.Tensor.retain_grad)
def retain_grad(tensor: ShardedTensor) -> None:
    """Keep the gradient of a result; nothing changes for a leaf."""
    tensor._local.retain_grad()
