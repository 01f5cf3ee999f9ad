"""Checks modules before they are sharded, and detects parameters that were replaced or converted since a forward.

A conversion (``module.half()``), ``to_empty``, a load that assigns, ``param.data = ...`` or ``module.weight = ...``
leaves a module with other parameters, or parameters with local tensors of their own. As in a plain module, the present
values are used: the group is rebuilt over them. Changes that concern all ranks (dtypes, which parameters train) are
detected from facts that are equal on all ranks, never from addresses, which differ if a rank's shard is empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from shardtensor.errors import LayoutError, RuleError
from shardtensor.fsdp.outside import join_group, leave_group
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.param_info import ParamInfo
from shardtensor.fsdp.policy import MixedPrecisionPolicy
from shardtensor.fsdp.state import FSDPState, plain_class, state_of
from shardtensor.tensor.convert import drop_weak_references
from shardtensor.tensor.memory import become, laid_out_as, swap
from shardtensor.tensor.sharded_tensor import ShardedTensor


def check(modules: Sequence[nn.Module], params_info: Sequence[ParamInfo], policy: MixedPrecisionPolicy) -> None:
    """Check that the modules' own parameters can become one unit.

    Raises:
        LayoutError: (a ValueError) parameters are in another unit already, or have a dtype that has no sum.
        RuleError: (a RuntimeError) a parameter object cannot be changed: a graph or a weak reference refers to it.
    """
    for info in params_info:
        _check_free(modules, info)
    for info in params_info:
        _check_dtype(info, policy)
        _check_changeable(info)


def _check_free(modules: Sequence[nn.Module], info: ParamInfo) -> None:
    group = getattr(info.param, "_param_group", None)
    if group is None:
        return
    [other] = [each for each in group.params_info if each.param is info.param]
    if info.locations[0] in other.locations:
        raise LayoutError(
            f'"{info.name}" of this {plain_class(modules[0]).__name__} is held by the fully sharded module around it '
            "already",
            {"there": f'"{other.name}"'},
            "call fully_shard bottom up: inner modules first, the module that holds them last",
        )
    raise LayoutError(
        f'"{info.name}" of this {plain_class(modules[0]).__name__} is one tensor with "{_name_in(modules, other)}", '
        "which is in another fully sharded module",
        {"names": f'"{info.name}" and "{_name_in(modules, other)}"', "shape": tuple(info.param.shape)},
        "call fully_shard on neither of the modules that share it, but on one that holds both",
    )


def _name_in(modules: Sequence[nn.Module], other: ParamInfo) -> str:
    """Return the name of another unit's parameter, relative to `modules` if they contain it."""
    for module in modules:
        for prefix, owner in module.named_modules():
            for holder, name in other.locations:
                if owner is holder:
                    return f"{prefix}.{name}" if prefix else name
    return f"{plain_class(other.locations[0][0]).__name__}.{other.name}"


def _check_dtype(info: ParamInfo, policy: MixedPrecisionPolicy) -> None:
    param = info.param
    if not param.requires_grad:
        return
    summed = policy.reduce_dtype or policy.param_dtype or param.dtype
    if summed.itemsize == 1 or not (summed.is_floating_point or summed.is_complex):
        raise LayoutError(
            f'the gradient of "{info.name}" would be summed over the ranks in {summed}, which has no sum',
            {"parameter": param.dtype, "reduced in": summed},
            ["MixedPrecisionPolicy(reduce_dtype=torch.float32)", "freeze the parameter: requires_grad_(False)"],
        )


def _check_changeable(info: ParamInfo) -> None:
    """Swap the parameter's contents and swap them back: all parameters are swapped after all ranks agree."""
    param: Any = info.param
    for owner, _ in info.locations:
        drop_weak_references(owner, [param])
    dummy = torch.empty(0)
    swap(f'"{info.name}"', param, dummy)
    torch.utils.swap_tensors(param, dummy)


def refuse_transform(state: FSDPState) -> None:
    """Refuse to run a fully sharded module inside a transform of torch.func, which cannot transform its gathers.

    Raises:
        RuleError: a transform is active.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuleError(
            "a fully sharded module was called inside of a torch.func transform (grad, vjp, jvp, vmap, ...)",
            {"module": state.title, "why": "a gather is no operation that could be transformed"},
            [
                "torch.autograd.grad(loss, inputs), or loss.backward() and param.grad, give the same gradients",
                "shardtensor.unshard_module(module) makes it a plain module, to transform the function of that",
            ],
        )


_changes, _local, _pointer = attrgetter("changes"), attrgetter("_local"), torch.Tensor.data_ptr


class ParameterWatch:
    """Checks whether the parameters of units are unchanged since this was made; half a microsecond for each module."""

    def __init__(self, states: Sequence[FSDPState]) -> None:
        self._param_groups = [group for state in states for group in state.param_groups]
        locations = (at for group in self._param_groups for info in group.params_info for at in info.locations)
        self._places = list({id(owner): owner._parameters for owner, _ in locations}.values())
        self._held = [param for place in self._places for param in place.values()]
        self._sharded_params = [sharded for group in self._param_groups for sharded in group.sharded_params]
        self._changes, self._pointers = self._count(), self._point()

    def holds(self) -> bool:
        """Whether only values have changed."""
        return (
            self._count() == self._changes
            and all(map(is_, chain.from_iterable(map(dict.values, self._places)), self._held))
            and self._point() == self._pointers
        )

    def _count(self) -> int:
        return sum(map(_changes, self._param_groups))

    def _point(self) -> list[int]:
        return list(map(_pointer, map(_local, self._sharded_params)))


def reset_sharded_params(state: FSDPState) -> None:
    """Rebuild the groups of a unit over the parameters that its modules hold now.

    It sends nothing, except to redistribute a parameter that has another layout, and to compare those of a broken tie.

    Raises:
        RuleError: a parameter is missing or has another shape, or dtypes in a group differ.
    """
    for group in state.param_groups:
        _reset(group)


def reset_if_complete(state: FSDPState) -> None:
    """Call `reset_sharded_params` if that is possible already; otherwise the next forward does it, or raises.

    It is called after each of the unit's modules was converted or loaded; others of them may still follow.
    """
    with contextlib.suppress(RuleError):
        reset_sharded_params(state)


def _reset(group: ParamGroup) -> None:
    for i, info in enumerate(group.params_info):
        found = _present(info, tuple(group.sharded_params[i].shape))
        if found is not group.sharded_params[i]:
            _adopt(group, i, found)
    leaves = [sharded._local for sharded in group.sharded_params]
    if len({(leaf.dtype, leaf.device) for leaf in leaves}) > 1:
        raise _mixed_error(group)
    if group.is_aliased():
        group.trains = tuple(leaf.requires_grad for leaf in leaves)
        group.set_dtypes()
    else:
        group.repack()


def _present(info: ParamInfo, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the parameter that the modules have now, and put it under all names of `info`."""
    present = [owner._parameters.get(name) for owner, name in info.locations]
    first = next((param for param in present if param is not info.param), info.param)
    if first is None or any(param is None for param in present):
        raise RuleError(f'"{info.name}" was taken out of a fully sharded module', fix=_AGAIN)
    if tuple(first.shape) != shape:
        raise RuleError(
            f'"{info.name}" of a fully sharded module was replaced by a tensor of another shape',
            {"was": shape, "is": tuple(first.shape)},
            _AGAIN,
        )
    others = [param for param in present if param is not first and param is not info.param]
    if others and not all(torch.equal(first, other) for other in others if other is not None):
        raise RuleError(
            f'"{info.name}" has {len(info.locations)} names, under which there are different tensors now',
            fix="put one tensor under all names of a tied parameter",
        )
    for owner, name in info.locations:
        owner._parameters[name] = first  # type: ignore[assignment]
    return first


_AGAIN = "change modules before fully_shard"


def _adopt(group: ParamGroup, i: int, param: Any) -> None:
    """Replace parameter `i` of a group by `param`: a ShardedTensor of any layout, or a full tensor on all ranks."""
    old = group.sharded_params[i]
    if not isinstance(param, ShardedTensor) or param._layout != old._layout:
        value = laid_out_as(param, old)
        value.requires_grad_(param.requires_grad)
        become(param, value)
    group.sharded_params[i] = group.params_info[i].param = param
    join_group(param, group, i)
    group.leaf_changed(is_replaced=True)
    if old is not param:
        leave_group(old)


def _mixed_error(group: ParamGroup) -> RuleError:
    by_kind: dict[str, list[str]] = {}
    for info, sharded in zip(group.params_info, group.sharded_params, strict=True):
        by_kind.setdefault(f"{sharded.dtype} on {sharded.device.type}", []).append(info.name)
    return RuleError(
        "parameters that are gathered together have become of different dtypes or devices",
        {kind: ", ".join(names[:6]) for kind, names in by_kind.items()},
        "convert the whole module that fully_shard was called on, or convert parts of it before",
    )


def check_device(states: Iterable[FSDPState]) -> None:
    """Refuse to run units whose shards are not on the device of their group.

    Raises:
        LayoutError: shards are on the meta device or on another device.
    """
    for state in states:
        for group in state.param_groups:
            found = group.shard.device
            if found.type == group.device.type:
                continue
            names = ", ".join(info.name for info in group.params_info[:4])
            if found.type == "meta":
                raise LayoutError(
                    "parameters of a fully sharded module are on the meta device, without values",
                    {"module": state.title, "parameters": names},
                    ["materialize(model)", 'model.to_empty(device="cpu"), then set or load values'],
                )
            raise LayoutError(
                f"parameters of a fully sharded module are on {found}, and gathered on {group.device}",
                {"parameters": names},
                f'move the module back: module.to("{group.device}")',
            )


def after_load(module: nn.Module, keys: Any) -> None:
    """Reset the unit's parameters; a hook that runs after ``load_state_dict``."""
    state = state_of(module)
    if state is not None:
        reset_if_complete(state)
