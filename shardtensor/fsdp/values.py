"""The tensors in what modules take and give: alone, or in nested lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same structure with `function` of every tensor in it; what has no tensors is left as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        made = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        copied = value.copy()
        copied.update(changed)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        new = {name: map_tensors(function, item) for name, item in fields.items()}
        if all(new[name] is item for name, item in fields.items()):
            return value
        return dataclasses.replace(value, **new)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors of another dtype."""
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x, value)


Hook = Callable[[torch.Tensor], None]


def with_hook(output: Any, hook: Hook, leaf_hook: Hook) -> Any:
    """Have `hook` called when a gradient comes to any tensor of `output`, `leaf_hook` for a leaf; returns it.

    A leaf was computed from nothing: a module that gives it only passes it on.
    """
    if not isinstance(output, torch.Tensor):
        return map_tensors(lambda x: with_hook(x, hook, leaf_hook), output)
    if output.requires_grad:
        _register(output, hook, leaf_hook)
    return output


def _register(x: torch.Tensor, hook: Hook, leaf_hook: Hook) -> None:
    """As ``x.register_hook``, a quarter of whose time is spent on this: no handle is made to remove it.

    Of hooks on one tensor the last runs first: a module that only passes a tensor on has its backward before those
    that it came from.
    """
    node = x.grad_fn if type(x) is torch.Tensor else None
    if node is None:
        x.register_hook(leaf_hook if x.is_leaf else hook)
        return
    there: Any = x._backward_hooks
    if there is not None:
        earlier = list(there.items())
        there.clear()
        there[hook] = hook
        there.update(earlier)
        return
    hooks: OrderedDict[Any, Any] = OrderedDict(((hook, hook),))
    x._backward_hooks = hooks
    node._register_hook_dict(x)
