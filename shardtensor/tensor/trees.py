"""Find, replace and hook the tensors that modules take and return in nested lists, tuples, dicts and objects.

Tensors in other objects are found, but cannot be replaced.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import SUPPORTED_NODES

from shardtensor.tensor.sharded_tensor import local_of


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the same structure with `function` applied to every tensor; unchanged parts are the same objects."""
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
    """Return `value` with its floating-point tensors cast to `dtype`."""
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x, value)


_ATOMS = (str, bytes, int, float, complex, type(None), type, ModuleType, nn.Module, torch.dtype, torch.device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`: in containers, nodes of torch trees, attributes of objects that are no modules."""
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif not isinstance(item, _ATOMS) and id(item) not in seen:
            seen.add(id(item))
            left += _parts_of(item)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | set | frozenset | deque):
        inside = list(value)
    elif isinstance(value, dict):
        inside = list(value.values())
    elif type(value) in SUPPORTED_NODES:
        inside = list(SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    else:
        buffers = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = [name for each in buffers for name in ([each] if isinstance(each, str) else each)]
        inside = [getattr(value, name) for name in names if name != "__dict__" and hasattr(value, name)]
    return inside + list(getattr(value, "__dict__", {}).values())


Hook = Callable[[torch.Tensor], None]


def with_hook(output: Any, hook: Hook, leaf_hook: Hook | None = None) -> Any:
    """Call `hook` when a gradient reaches any tensor of `output`, `leaf_hook`, if any, for a leaf; return `output`.

    No operation computed a leaf: a module that returns one only passes it on.
    """
    if not isinstance(output, torch.Tensor):
        for x in tensors_in(output):
            with_hook(x, hook, leaf_hook)
    elif output.requires_grad:
        _register(output if type(output) is torch.Tensor else local_of(output), hook, leaf_hook)
    return output


def _register(x: torch.Tensor, hook: Hook, leaf_hook: Hook | None) -> None:
    """Register `hook` as ``x.register_hook`` does, but before the tensor's earlier hooks and without a handle.

    A module that only passes a tensor on runs its backward before the module that computed it. Making handles takes a
    quarter of the time of ``register_hook``.
    """
    base = x._base
    if base is not None and base.grad_fn is not None:
        x = base  # an in-place write changes a view's node, but gradients still flow to the base's
    node = x.grad_fn if type(x) is torch.Tensor else None
    if node is None:
        found = leaf_hook if x.is_leaf else hook
        if found is not None:
            x.register_hook(found)
        return
    hooks: Any = x._backward_hooks
    if hooks is not None:
        later = list(hooks.items())
        hooks.clear()  # autograd reads it as a plain dict, whose order `move_to_end` does not change
        hooks.update([(hook, hook), *later])
        return
    x._backward_hooks = OrderedDict(((hook, hook),))  # type: ignore[arg-type]
    node._register_hook_dict(x)
