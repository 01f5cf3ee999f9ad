"""The arguments of a train step: which are modules, which optimizers, which tensors; parameters and buffers by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from shardtensor.errors import LayoutError

Leaf = Callable[[Any], Any]


def rebuilt(value: Any, leaf: Leaf) -> Any:
    """Return nested containers with `leaf` applied to everything that is no list, tuple or mapping, in order."""
    if isinstance(value, list | tuple):
        made = [rebuilt(item, leaf) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, Mapping):
        if type(value) is dict:
            return {key: rebuilt(item, leaf) for key, item in value.items()}
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = rebuilt(item, leaf)
        return copied
    return leaf(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield what `rebuilt` would pass to its function."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


@attrs.frozen(eq=False)
class Held:
    """A parameter or a buffer, and every place where modules hold it.

    Attributes:
        name: the first of its names.
        tensor: the user's.
        places: the dicts of modules that hold it, with the key.
        is_param: whether it is a parameter.
    """

    name: str
    tensor: torch.Tensor
    places: list[tuple[dict[str, Any], str]]
    is_param: bool


@attrs.frozen(eq=False)
class Arguments:
    """What a call of a train step passes.

    Attributes:
        args, kwargs: as passed.
        modules: name -> module; the outermost ones, each once.
        optimizers: in order, each once.
        tensors: the other tensors: the batch.
        constants: the other values, as text.
        held: parameters and buffers of the modules, each once.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: dict[str, nn.Module]
    optimizers: list[Optimizer]
    tensors: list[torch.Tensor]
    constants: tuple[str, ...]
    held: list[Held]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Sort the arguments of a call.

        Raises:
            LayoutError: there is no module, or a parameter that an optimizer steps is in none of them.
        """
        modules: list[nn.Module] = []
        optimizers: list[Optimizer] = []
        tensors, constants = [], []
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, nn.Module):
                modules += [leaf] * (not any(leaf is other for other in modules))
            elif isinstance(leaf, Optimizer):
                optimizers += [leaf] * (not any(leaf is other for other in optimizers))
            elif isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            else:
                constants.append(repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__)
        if not modules:
            raise LayoutError(
                "the train step was called without a module",
                {"arguments": ", ".join(type(x).__name__ for x in leaves_of((args, kwargs))) or "(none)"},
                "pass the model to the compiled function, not by a closure: compiled(model, optimizer, batch)",
            )
        inner = {id(child) for module in modules for child in list(module.modules())[1:]}
        outer = [module for module in modules if id(module) not in inner]
        named = {"" if len(outer) == 1 else f"{i}.": module for i, module in enumerate(outer)}
        held = list(_held(named))
        found = cls(args, kwargs, named, optimizers, tensors, tuple(constants), held)
        found._check_optimizers()
        return found

    def _check_optimizers(self) -> None:
        known = {id(held.tensor) for held in self.held}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for i, param in enumerate(group["params"]):
                    if id(param) not in known:
                        raise LayoutError(
                            f"{type(optimizer).__name__} steps a parameter of a module that is no argument",
                            {"optimizer": f"number {number}", "parameter": f"{i}, of shape {tuple(param.shape)}"},
                            "pass every module whose parameters the step trains",
                        )

    def parts(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the structure with tensors described by dtype and number of dims, for a key."""
        return self.args, self.kwargs


_PLAIN = (str, bytes, int, float, complex, type(None), bool, torch.dtype, torch.device)


def _held(modules: Mapping[str, nn.Module]) -> Iterator[Held]:
    found: dict[int, Held] = {}
    for prefix, module in modules.items():
        for path, owner in module.named_modules(remove_duplicate=True):
            for is_param, place in ((True, owner._parameters), (False, owner._buffers)):
                for key, tensor in place.items():
                    if tensor is None:
                        continue
                    name = f"{prefix}{path}.{key}" if path else f"{prefix}{key}"
                    held = found.setdefault(id(tensor), Held(name, tensor, [], is_param))
                    held.places.append((place, key))
    return iter(found.values())
