"""Whether a gathered parameter that autograd saved still has its values: autograd checks that by version counters.

Modules compute with views of memory that units use in turns. While a unit's values are there, the counters of its views
are at the number of these values (`next_generation`); while they are not, at the unit's number for that. Autograd
compares the counter of a saved tensor when a backward uses it, so it refuses one without its values, however the
backward got there, and at no cost for an operation. The refusal is then said in the user's words: see `explained`.

Below it are the tensors in what modules take and return: alone, in nested lists, tuples, dicts and dataclasses; those
in other objects are found, too, but cannot be replaced there.
"""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from operator import is_
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import SUPPORTED_NODES

from shardtensor.errors import RuleError
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


class Owner(Protocol):
    """Whose parameters they are, as errors name it, and the counters of these."""

    versions: Versions

    @property
    def title(self) -> str:
        """The module, for messages."""


_set_versions = torch._C._autograd._unsafe_set_version_counter
_SPACE = 64  # between generations; autograd counts a user's writes to a gathered parameter from there
_generations = count(1 << 20, _SPACE)  # above what the counters of other tensors come to
_absences = count(1 << 31)  # counters have 32 bits
_REFUSAL = re.compile(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+);")

_owners: WeakSet[Owner] = WeakSet()


def next_generation() -> int:
    """Return a new number for values of parameters; no other values have it."""
    return next(_generations)


class Versions:
    """The counters of one unit's views.

    Attributes:
        present: where they stand.
        absent: where they stand while other values are in the unit's memory.
    """

    def __init__(self, state: Owner, parts: Sequence[torch.Tensor]) -> None:
        self._parts = tuple(parts)
        self.absent = next(_absences)
        self.present = -1
        self.displaced()
        _owners.add(state)

    def displaced(self) -> None:
        """Note that other values come into the unit's memory."""
        set_versions([self], self.absent)

    def are_of(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether these are the counters of `parts`."""
        return len(parts) == len(self._parts) and all(map(is_, parts, self._parts))

    def has_one_of(self, sizes: Sequence[int]) -> bool:
        """Whether a tensor of `sizes` may be one of the parameters, or be one with its dims in another order."""
        return any(sorted(part.shape) == sorted(sizes) for part in self._parts)


def set_versions(of: Iterable[Versions], version: int, only_present: bool = False) -> None:
    """Set the counters of several units to `version` by one call of torch.

    Args:
        only_present: of those units alone that have some values in their memory.
    """
    parts: list[torch.Tensor] = []
    for one in of:
        there = one.present
        if there != version and not (only_present and there == one.absent):
            one.present = version
            parts += one._parts
    if parts:
        _set_versions(tuple(parts), (version,) * len(parts))


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, whose refusal of a parameter that is not gathered names the module."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_backward(*args, **kwargs)
        except RuntimeError as error:
            explanation = explained(error)
            if explanation is None:
                raise
            raise explanation from error


def watch_backward() -> None:
    """Have errors of autograd about gathered parameters explained from now on, in the whole process."""
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()


def explained(error: RuntimeError) -> RuleError | None:
    """Say why autograd refused a saved parameter of a fully sharded module; None for other errors."""
    found = _REFUSAL.search(str(error)) if type(error) is RuntimeError else None
    if found is None:
        return None
    sizes, version = [int(size) for size in found[1].split(",") if size.strip()], int(found[2])
    states = [state for state in _owners if state.versions.present == version]
    states = [state for state in states if state.versions.has_one_of(sizes)] or states
    if not states:
        return None
    modules = sorted({state.title for state in states})
    facts = {"module" if len(modules) == 1 else "one of": ", ".join(modules[:4]), "saved tensor": tuple(sizes)}
    if version >> 31:
        return RuleError(
            "backward came to parameters of a fully sharded module that are no longer gathered, by another way than a "
            "result of the module's forward",
            facts,
            [
                "return what the loss is computed from in the results of the module's forward, rather than keep it in"
                " an attribute, a hook or a closure",
                "fully_shard(module, reshard_after_forward=False) keeps parameters gathered; second derivatives"
                " (create_graph=True) need it",
            ],
        )
    return _written(facts)


def written_too_early(params_info: Iterable[Any]) -> RuleError:
    """The refusal of a backward whose parameters are no longer those of the forward."""
    return _written({"parameters": ", ".join([info.name for info in params_info][:4])})


def _written(facts: Mapping[str, Any]) -> RuleError:
    return RuleError(
        "parameters were written between a forward and its backward",
        facts,
        "call backward before the optimizer steps or values are loaded",
    )


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
        buffers = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = [name for each in buffers for name in ([each] if isinstance(each, str) else each)]
        inside = [getattr(value, name) for name in names if name != "__dict__" and hasattr(value, name)]
    return inside + list(getattr(value, "__dict__", {}).values())


def held_apart(output: Any, memory: range, state: Owner) -> Any:
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
