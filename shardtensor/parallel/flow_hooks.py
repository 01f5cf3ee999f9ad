"""Hooks that redistribute inputs and results of modules other than layers: containers, and users' own modules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.comm.redistribute import run_moves, sizes_of_slice
from shardtensor.errors import RuleError
from shardtensor.layout.route import DimStep
from shardtensor.ops.linear import is_large, share
from shardtensor.parallel.layers import LinearFlow, Moves, local, refuse_sharded
from shardtensor.plan.flows.flow import cuts
from shardtensor.spec.nodes import Spec
from shardtensor.tensor.placing import bind_named, mesh_of
from shardtensor.tensor.reshard import reshard
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


@attrs.frozen(eq=False)
class Wrapping:
    """Wraps local values as ShardedTensors, for a module that may do anything with them and with its parameters."""

    spec: Spec
    slices: tuple[tuple[Group, DimStep], ...]
    group: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape = list(x.shape)
        for subgroup, step in self.slices:
            sizes = sizes_of_slice(x, step, subgroup)
            shape[step.dim] = x.shape[step.dim] * subgroup.size if sizes is None else sum(sizes)
        layout = bind_named(self.spec, tuple(shape), mesh_of(self.group))
        return x if layout.is_replicated else wrap(x, layout, self.spec, self.group)


@attrs.frozen(eq=False)
class FlowPreHook:
    """A forward pre-hook: redistributes the arguments that a plan names.

    Attributes:
        moves: the redistribution of each argument, by its name.
        places: the position of each argument.
        wraps: by the name of the argument, for modules that work on ShardedTensors.
        sums: the arguments' gradients are partial sums.
    """

    moves: Mapping[str, Moves]
    places: Mapping[str, int]
    wraps: Mapping[str, Wrapping] = attrs.field(factory=dict)
    sums: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args_found = list(args)
        if self.sums and torch.is_grad_enabled():
            self._refuse_unnamed(module, args, kwargs)
        for name, moves in self.moves.items():
            place = self.places[name]
            if name in kwargs:
                kwargs = {**kwargs, name: self._entered(module, name, kwargs[name], moves)}
            elif place < len(args_found):
                args_found[place] = self._entered(module, name, args_found[place], moves)
        return tuple(args_found), kwargs

    def _refuse_unnamed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise for another argument that requires a gradient: sharded products may give it one rank's partial sum."""
        named = {name: args[place] for name, place in self.places.items() if place < len(args)} | kwargs
        for name, x in named.items():
            if isinstance(x, torch.Tensor) and x.requires_grad and name not in self.moves:
                raise RuleError(
                    f"{type(module).__name__}: it is not said how `{name}` enters, and it wants a gradient",
                    {"said": ", ".join(f"in {name}" for name in self.moves)},
                    [f"write `in {name}: replicate` in the plan", "give it without a gradient: detach()"],
                )

    def _entered(self, module: nn.Module, name: str, x: Any, moves: Moves) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        refuse_sharded(module, x)
        if name in self.wraps:
            return self.wraps[name](run_moves(x, moves))
        if is_large(x) and not torch.compiler.is_compiling() and collectives.differentiates(x):
            return self._shared(module, x, moves)
        return run_moves(x, moves)

    def _shared(self, module: nn.Module, x: torch.Tensor, moves: Moves) -> torch.Tensor:
        """Redistribute `x`; backward starts the last sum before the weights' gradients of children that read `x`."""
        children = [child for child in module._modules.values() if isinstance(child, LinearFlow) and child.flow.shares]
        found = [local(child, "weight") for child in children]
        weights = [each for each in found if each is not None and each.requires_grad and each.dtype == x.dtype]
        if weights and x.is_floating_point() and moves and moves[-1].step.sums:
            return share(run_moves(x, moves[:-1]), weights, moves[-1])
        return run_moves(x, moves)

    def __deepcopy__(self, memo: Any) -> FlowPreHook:
        return self


@attrs.frozen(eq=False)
class Result:
    """One of a module's results: its redistribution and, if the module works on ShardedTensors, its layout before."""

    moves: Moves
    takes_from: Spec | None = None

    def left(self, module: nn.Module, y: Any) -> Any:
        if not isinstance(y, torch.Tensor) or not (y.is_floating_point() or y.is_complex()):
            return y
        if self.takes_from is not None and cuts(self.takes_from) and not isinstance(y, ShardedTensor):
            raise RuleError(
                f"{type(module).__name__} returns a whole tensor where the plan says that it gives a part",
                {"out": str(self.takes_from), "found": f"{tuple(y.shape)} on every rank"},
                f"write `out: replicate -> {self.takes_from}`",
            )
        if isinstance(y, ShardedTensor) and self.takes_from is not None:
            y = reshard(y, self.takes_from)
            y = y._local if isinstance(y, ShardedTensor) else y
        refuse_sharded(module, y)
        return run_moves(y, self.moves)


@attrs.frozen(eq=False)
class FlowHook:
    """A forward hook: redistributes what a module returns.

    Attributes:
        results: by position, or by the name of a field, as the plan names them; empty for the first.
    """

    results: Mapping[str, Result]

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        for name, result in self.results.items():
            output = self._with(module, name, result, output)
        return output

    def _with(self, module: nn.Module, name: str, result: Result, output: Any) -> Any:
        """Return the output with one of its results redistributed; skip a result that it does not have this time."""
        if isinstance(output, dict):
            names = list(output)
        elif dataclasses.is_dataclass(output):
            names = [field.name for field in dataclasses.fields(output)]
        elif isinstance(output, tuple | list):
            names = list(getattr(output, "_fields", map(str, range(len(output)))))
        elif name in ("", "0"):
            return result.left(module, output)
        else:
            raise self._no_result(module, name, ["0"])
        place = names.index(name) if name in names else int(name or 0) if (name or "0").isdecimal() else len(names)
        if place >= len(names):
            if hasattr(output, name) or (isinstance(output, tuple | list) and (name or "0").isdecimal()):
                return output
            raise self._no_result(module, name, names)
        key = names[place]
        if isinstance(output, dict):
            output[key] = result.left(module, output[key])
            return output
        if dataclasses.is_dataclass(output):
            return dataclasses.replace(output, **{key: result.left(module, getattr(output, key))})  # type: ignore
        parts = [result.left(module, y) if i == place else y for i, y in enumerate(output)]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)

    def _no_result(self, module: nn.Module, name: str, names: list[str]) -> RuleError:
        return RuleError(
            f"{type(module).__name__} has no result `{name}`, of which the plan says how it leaves",
            {"results": ", ".join(names)},
            f"name one of its results after `out` in the plan, in place of `{name}`",
        )

    def __deepcopy__(self, memo: Any) -> FlowHook:
        return self


def arguments(module: nn.Module) -> dict[str, int]:
    """Return the names of a module's arguments and their positions."""
    return {name: i for i, name in enumerate(inspect.signature(module.forward).parameters)}
