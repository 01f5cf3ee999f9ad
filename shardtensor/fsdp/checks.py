"""What `fully_shard` looks at before anything moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardtensor.errors import LayoutError, RuleError
from shardtensor.fsdp.entry import Entry
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.unit import Unit, unit_of
from shardtensor.parallel.memory import cannot_change
from shardtensor.tensor.modules import drop_weak_references


def check(modules: Sequence[nn.Module], entries: Sequence[Entry], policy: MixedPrecisionPolicy) -> None:
    """Return where the modules' own parameters can become one unit.

    Raises:
        LayoutError: (a ValueError) parameters are in another unit already, or have a dtype that has no sum.
        RuleError: (a RuntimeError) a parameter is held in a way that keeps it as it is.
    """
    for entry in entries:
        _check_free(modules, entry)
    for entry in entries:
        _check_dtype(entry, policy)
        _check_changeable(entry)


def _check_free(modules: Sequence[nn.Module], entry: Entry) -> None:
    flat = getattr(entry.param, "_flat", None)
    if flat is None:
        return
    [other] = [known for known in flat.entries if known.param is entry.param]
    owner, name = entry.homes[0]
    if any(home[0] is owner and home[1] == name for home in other.homes):
        raise LayoutError(
            f'"{entry.name}" of this {_kind(modules[0])} is held by the fully sharded module around it already',
            {"there": f'"{other.name}"'},
            "call fully_shard bottom up: inner modules first, the module that holds them last",
        )
    raise LayoutError(
        f'"{entry.name}" of this {_kind(modules[0])} is one tensor with "{_name_in(modules, other)}", which is in '
        "another fully sharded module",
        {"names": f'"{entry.name}" and "{_name_in(modules, other)}"', "shape": tuple(entry.param.shape)},
        "call fully_shard on neither of the modules that share it, but on one that holds both",
    )


def _name_in(modules: Sequence[nn.Module], other: Entry) -> str:
    """The name of another unit's parameter, as seen from `modules` if they hold it."""
    for module in modules:
        for prefix, owner in module.named_modules():
            for home, name in other.homes:
                if owner is home:
                    return f"{prefix}.{name}" if prefix else name
    return f"{_kind(other.homes[0][0])}.{other.name}"


def _kind(module: nn.Module) -> str:
    """The name of a module's class as people wrote it."""
    return (type(module).__mro__[2] if unit_of(module) is not None else type(module)).__name__


def _check_dtype(entry: Entry, policy: MixedPrecisionPolicy) -> None:
    param = entry.param
    if not param.requires_grad:
        return
    summed = policy.reduce_dtype or policy.param_dtype or param.dtype
    if summed.itemsize == 1 or not (summed.is_floating_point or summed.is_complex):
        raise LayoutError(
            f'the gradient of "{entry.name}" would be summed over the ranks in {summed}, which has no sum',
            {"parameter": param.dtype, "reduced in": summed},
            ["MixedPrecisionPolicy(reduce_dtype=torch.float32)", "freeze the parameter: requires_grad_(False)"],
        )


def _check_changeable(entry: Entry) -> None:
    """Try to swap the parameter's contents, both ways: what will be done to all of them once all ranks agree."""
    param: Any = entry.param
    for owner, _ in entry.homes:
        drop_weak_references(owner, [param])
    dummy = torch.empty(0)
    try:
        torch.utils.swap_tensors(param, dummy)
        torch.utils.swap_tensors(param, dummy)
    except RuntimeError as error:
        raise cannot_change(f'"{entry.name}"', param, error) from error


def refuse_transform(unit: Unit) -> None:
    """Refuse to run a fully sharded module inside of a transform of torch.func, which its gathers cannot follow.

    Raises:
        RuleError: one is active.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuleError(
            "a fully sharded module was called inside of a torch.func transform (grad, vjp, jvp, vmap, ...)",
            {"module": unit.title, "why": "a gather is no operation that could be transformed"},
            [
                "torch.autograd.grad(loss, inputs), or loss.backward() and param.grad, give the same gradients",
                "shardtensor.unshard_module(module) makes it a plain module, to transform the function of that",
            ],
        )
