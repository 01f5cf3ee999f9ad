"""The arguments of a train step: modules, optimizers, and the tensors of the batch, anywhere in nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from shardtensor.errors import LayoutError, StaleParameterError

_PLAIN = (str, bytes, int, float, complex, type(None), bool, torch.dtype, torch.device)


def rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return nested containers with `leaf` applied to everything that is no list, tuple, mapping or dataclass."""
    if isinstance(value, list | tuple):
        made = [rebuilt(item, leaf) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if type(value) is dict:
        return {key: rebuilt(item, leaf) for key, item in value.items()}
    if _is_fields(value):
        copied: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, rebuilt(getattr(value, field.name), leaf))
        return copied
    if isinstance(value, Mapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = rebuilt(item, leaf)
        return copied
    return leaf(value)


def _is_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module | Optimizer)


@attrs.frozen(eq=False)
class StepArguments:
    """The arguments of one call.

    Attributes:
        args, kwargs: as passed.
        modules, optimizers: in order, each once.
        leaves: tensors of the batch as passed, in order; `tensors` are contiguous, as programs are compiled for.
        key: equal for calls that can run the same program, as far as the arguments tell.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: list[nn.Module]
    optimizers: list[Optimizer]
    leaves: list[torch.Tensor]
    tensors: list[torch.Tensor]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments:
        """Sort the arguments of a call; takes some microseconds."""
        modules: dict[int, nn.Module] = {}
        optimizers: dict[int, Optimizer] = {}
        tensors: list[torch.Tensor] = []
        key: list[Any] = []
        left: list[Any] = [kwargs, args]
        while left:
            item = left.pop()
            if isinstance(item, torch.Tensor):
                tensors.append(item)
                key.append((item.shape, item.dtype, item.device))
            elif isinstance(item, list | tuple):
                key.append((type(item), len(item)))
                left += reversed(item)
            elif isinstance(item, Mapping):
                key.append((type(item), tuple(item)))
                left += reversed(list(item.values()))
            elif isinstance(item, _PLAIN):
                key.append((type(item), item))
            elif _is_fields(item):
                names = [field.name for field in dataclasses.fields(item)]
                key.append((type(item), tuple(names)))
                left += [getattr(item, name) for name in reversed(names)]
            else:
                if isinstance(item, nn.Module):
                    modules[id(item)] = item
                elif isinstance(item, Optimizer):
                    optimizers[id(item)] = item
                key.append(id(item))
        contiguous = [x.contiguous() for x in tensors]
        return cls(args, kwargs, list(modules.values()), list(optimizers.values()), tensors, contiguous, tuple(key))

    def text(self, batch_dim: int) -> str:
        """Return what all ranks must pass alike, without the number of samples."""
        lines = [type(optimizer).__name__ for optimizer in self.optimizers]
        for x in self.tensors:
            sizes: list[Any] = list(x.shape)
            if x.dim() > batch_dim:
                sizes[batch_dim] = "batch"
            lines.append(f"tensor {' x '.join(map(str, sizes)) or 'of one number'} {x.dtype}")
        lines += [repr(item[1]) for item in self.key if isinstance(item, tuple) and item[0] in _PLAIN]
        return "\n".join(lines)


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


class Tree:
    """The modules of a call, as they were when a program was compiled.

    Attributes:
        roots: the outermost modules, each once, with a prefix for names.
        held: their parameters and buffers, each once.

    Raises:
        LayoutError: there is no module, or an optimizer steps a parameter that is in none.
    """

    def __init__(self, call: StepArguments) -> None:
        inner = {id(child) for module in call.modules for child in list(module.modules())[1:]}
        outer = [module for module in call.modules if id(module) not in inner]
        if not outer:
            raise LayoutError(
                "the train step was called without a module",
                {"arguments": ", ".join(type(x).__name__ for x in (*call.args, *call.kwargs.values())) or "(none)"},
                "pass the model to the compiled function: compiled(model, optimizer, batch)",
            )
        self.roots = {"" if len(outer) == 1 else f"{i}.": module for i, module in enumerate(outer)}
        self.held = list(self._held())
        self._modules = [module for root in outer for module in root.modules()]
        self._check(call.optimizers)
        self.record()

    def record(self) -> None:
        """Record which tensors and modules there are, whether they train, and which parameters do."""
        self._structure = [
            (vars(module), key, vars(module)[key], list(vars(module)[key].values()))
            for module in self._modules
            for key in ("_parameters", "_buffers", "_modules")
            if vars(module)[key]
        ]
        self.flags = self.flags_now()

    def flags_now(self) -> list[bool]:
        """Return whether each module trains, and whether each parameter requires a gradient."""
        return [m.training for m in self._modules] + [h.tensor.requires_grad for h in self.held if h.is_param]

    def _held(self) -> Iterator[Held]:
        found: dict[int, Held] = {}
        for prefix, root in self.roots.items():
            for path, owner in root.named_modules():
                for is_param, place in ((True, owner._parameters), (False, owner._buffers)):
                    for key, tensor in place.items():
                        if tensor is not None:
                            name = f"{prefix}{path}.{key}" if path else f"{prefix}{key}"
                            held = found.setdefault(id(tensor), Held(name, tensor, [], is_param))
                            held.places.append((place, key))
        return iter(found.values())

    def _check(self, optimizers: list[Optimizer]) -> None:
        known = {id(held.tensor) for held in self.held}
        for number, optimizer in enumerate(optimizers):
            lost = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
            if lost:
                raise LayoutError(
                    f"{type(optimizer).__name__} steps a parameter of a module that is no argument",
                    {"optimizer": f"number {number} of the arguments", "shape": tuple(lost[0].shape)},
                    "pass every module whose parameters the step trains: compiled(model, head, optimizer, batch)",
                )

    def is_current(self) -> bool:
        """Whether modules train and parameters require gradients as recorded.

        Raises:
            StaleParameterError: modules hold other tensors or submodules than recorded.
        """
        for owner, key, place, held in self._structure:
            if owner[key] is not place or len(place) != len(held) or not all(map(is_, place.values(), held)):
                raise self._stale(owner, owner[key], held)
        return self.flags == self.flags_now()

    def _stale(self, owner: dict[str, Any], place: dict[str, Any], held: list[Any]) -> StaleParameterError:
        changed = [key for key, now in place.items() if not any(now is x for x in held)]
        named = ((f"{prefix}{path}", m) for prefix, root in self.roots.items() for path, m in root.named_modules())
        names = (name or type(module).__name__ for name, module in named if vars(module) is owner)
        facts = {
            "module": next(names, "one that was removed"),
            "changed": ", ".join(changed[:8]) or "it has fewer than before",
        }
        return StaleParameterError(
            "a module has changed since the train step was compiled",
            facts,
            "call reset() on the compiled step: the next call compiles it for the modules as they are",
        )
