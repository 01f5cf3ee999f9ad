"""The tensors in what modules take and give: alone, or in nested lists, tuples, dicts and dataclasses.

Those in other objects are found, too, but cannot be replaced there.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import SUPPORTED_NODES

from shardtensor.errors import RuleError
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of

if TYPE_CHECKING:
    from shardtensor.fsdp.unit import Unit


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


_ATOMS = (str, bytes, int, float, complex, type(None), type, ModuleType, nn.Module, torch.dtype, torch.device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in `value`: in containers, nodes of torch's trees, and attributes of objects that are no modules."""
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
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
        inside = [getattr(value, name) for name in names if name != "__dict__" and hasattr(value, name)]
    return inside + list(getattr(value, "__dict__", {}).values())


def held_apart(output: Any, memory: range, unit: Unit) -> Any:
    """Copy those tensors of `output` that lie in `memory`, which other values come to when the unit has run.

    Args:
        memory: the addresses of the unit's gathered parameters.
        unit: whose module returned `output`.

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
            {"module": unit.title, "object": type(output).__name__},
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
    """Have `hook` called when a gradient comes to any tensor of `output`, `leaf_hook` for a leaf; returns it.

    A leaf was computed from nothing: a module that gives it only passes it on.
    """
    if not isinstance(output, torch.Tensor):
        for x in tensors_in(output):
            with_hook(x, hook, leaf_hook)
    elif output.requires_grad:
        _register(output, hook, leaf_hook)
    return output


def _register(x: torch.Tensor, hook: Hook, leaf_hook: Hook) -> None:
    """As ``x.register_hook``, a quarter of whose time is spent on this: no handle is made to remove it.

    Of hooks on one tensor the last runs first: a module that only passes a tensor on has its backward before those
    that it came from.
    """
    if isinstance(x, ShardedTensor):
        x = x._local
    base = x._base
    if base is not None and base.grad_fn is not None:
        x = base  # a write to a view gives it another node; gradients go on to that of its base
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
