"""What a fully sharded module returns: copies of what lies in memory that other values come to, and backward hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from shardtensor.errors import RuleError
from shardtensor.fsdp.versions import Owner
from shardtensor.tensor.sharded_tensor import local_of
from shardtensor.tensor.trees import map_tensors, tensors_in


def not_in_buffer(output: Any, memory: range, state: Owner) -> Any:
    """Copy those tensors of `output` that lie in `memory`, which other values come to when the unit has run.

    Args:
        memory: the addresses of the unit's gathered parameters.
        state: whose module returned `output`.

    Raises:
        RuleError: such a tensor is in an object where it cannot be replaced.
    """
    if type(output) is torch.Tensor:  # looked at with as few calls as can be
        try:
            return output.clone() if output.data_ptr() in memory else output
        except RuntimeError:
            return output
    if not any(_address(x) in memory for x in tensors_in(output)):
        return output
    replaced = map_tensors(lambda x: x.clone() if _address(x) in memory else x, output)
    if any(_address(x) in memory for x in tensors_in(replaced)):
        raise RuleError(
            "the forward of a fully sharded module returned a view of its parameter inside of an object; other values"
            " come into that memory when the module has run",
            {"module": state.title, "object": type(output).__name__},
            "return a copy (parameter.clone()), or return it in a list, tuple, dict or dataclass",
        )
    return replaced


def _address(x: torch.Tensor) -> int:
    try:
        return int(local_of(x).data_ptr())
    except RuntimeError:  # it has no memory of its own: sparse, or made by a function transform
        return 0


Hook = Callable[[torch.Tensor], None]


def with_hook(output: Any, hook: Hook, leaf_hook: Hook) -> Any:
    """Call `hook` when a gradient comes to any tensor of `output`, `leaf_hook` for a leaf; return `output`.

    A leaf was computed from nothing: a module that returns one only passes it on.
    """
    if not isinstance(output, torch.Tensor):
        for x in tensors_in(output):
            with_hook(x, hook, leaf_hook)
    elif output.requires_grad:
        _register(local_of(output), hook, leaf_hook)
    return output


def _register(x: torch.Tensor, hook: Hook, leaf_hook: Hook) -> None:
    """As ``x.register_hook``, but that of hooks on one tensor the last runs first, and no handle is made.

    A module that only passes a tensor on has its backward before the one that made it. Handles are a quarter of the
    time of ``register_hook``.
    """
    base = x._base
    if base is not None and base.grad_fn is not None:
        x = base  # a write to a view gives it another node; gradients go on to that of its base
    node = x.grad_fn if type(x) is torch.Tensor else None
    if node is None:
        x.register_hook(leaf_hook if x.is_leaf else hook)
        return
    hooks: Any = x._backward_hooks
    if hooks is not None:
        later = list(hooks.items())
        hooks.clear()  # autograd reads the plain dict, which `move_to_end` leaves as it is
        hooks.update([(hook, hook), *later])
        return
    x._backward_hooks = OrderedDict(((hook, hook),))  # type: ignore[arg-type]
    node._register_hook_dict(x)
