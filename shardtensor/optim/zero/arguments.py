"""The arguments of a `ZeroRedundancyOptimizer`: parameters, groups of them and their hyperparameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardtensor.comm.agree import agree, call_text
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, RuleError, ShardTensorError, some
from shardtensor.layout.partition import Partition
from shardtensor.optim.named_params import params_text
from shardtensor.optim.update_units import UpdateUnit
from shardtensor.tensor.sharded_tensor import ShardedTensor

OWN_KEYS = frozenset({"params", "param_names"})
"""Keys of a group that differ between this optimizer and the inner one, which has this rank's part."""


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy the hyperparameters of each group."""
    for new, group in zip(source, target, strict=True):
        group.update({key: value for key, value in new.items() if key not in OWN_KEYS})


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Return the parameters, or groups of them, as groups with lists of parameters, checked.

    Raises:
        TypeError, ValueError: as torch's class raises them.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}"
        )
    groups = list(params)
    if not groups:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    if not all(isinstance(group, dict) for group in groups):
        groups = [{"params": groups}]
    if any("params" not in group for group in groups):
        raise ValueError(
            "Each parameter group passed-in via `params` must have a 'params' key mapping to the parameters in the "
            "group"
        )
    found = [[x["params"]] if isinstance(x["params"], torch.Tensor) else list(x["params"]) for x in groups]
    tensors = _tensors(found)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise TypeError("`params` argument should be an iterable of Tensors, (name, Tensor) pairs or dicts")
    if any(tensor.is_sparse for tensor in tensors):
        raise ValueError("ZeroRedundancyOptimizer only supports dense parameters, and some are sparse")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise ValueError("a parameter is listed twice; a rank would step it twice, and others not")
    return [{**group, "params": members} for group, members in zip(groups, found, strict=True)]


def _tensors(groups: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the parameters of groups without their names."""
    return [x[1] if isinstance(x, tuple) and len(x) == 2 else x for group in groups for x in group]


def check_arguments(
    arguments: Mapping[str, Any], unit: UpdateUnit, partition: Partition, groups: Iterable[Mapping[str, Any]]
) -> None:
    """Raise if the arguments of an optimizer contradict each other.

    Raises:
        ValueError: a value is unknown, or gradients would be reduced twice.
        RuleError: the class cannot step a part of the parameters.
    """
    overlap_with_ddp, overlap_gradients = arguments["overlap_with_ddp"], arguments["overlap_gradients"]
    if partition not in ("owners", "ranges"):
        raise ValueError(f'partition is "owners" or "ranges", not {partition!r}')
    if overlap_with_ddp and (overlap_gradients or partition == "ranges"):
        other = "overlap_gradients" if overlap_gradients else 'partition="ranges"'
        raise ValueError(
            f"overlap_with_ddp and {other} exclude each other: DDP reduces all gradients to all ranks, in buckets of "
            "its own. Leave one out; overlap_gradients=True needs no DDP"
        )
    if arguments["module"] is not None and not overlap_gradients and partition == "owners":
        raise ValueError('module= needs overlap_gradients=True or partition="ranges"; or leave module out')
    if overlap_gradients and isinstance(arguments["module"], nn.parallel.DistributedDataParallel):
        raise ValueError("overlap_gradients replaces DistributedDataParallel: pass the module that it wraps, unwrapped")
    if partition == "owners" and not overlap_gradients:
        types = sorted(set(map(torch.typename, _tensors(group["params"] for group in groups))))
        if len(types) > 1:
            raise ValueError(
                "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got "
                + " and ".join(types)
                + '; partition="ranges" and overlap_gradients=True take several'
            )
    if unit == "all" and (overlap_with_ddp or overlap_gradients):
        name = arguments["optimizer_class"].__name__
        raise RuleError(
            f"{name} updates all parameters together: every rank has to step all of them",
            fix="leave overlap_with_ddp and overlap_gradients out; every rank then steps all parameters",
        )


def copy_group(group: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Return a deep copy of a parameter group, as an argument."""
    copied = {key: copy.deepcopy(value, memo) for key, value in group.items() if key not in OWN_KEYS}
    params = [copy.deepcopy(param, memo) for param in group["params"]]
    names = group.get("param_names")
    return {**copied, "params": params if names is None else list(zip(names, params, strict=True))}


REDUCED_TWICE = "delete the other optimizer first (del), or leave overlap_gradients out"
"""How to go on if gradients of a parameter are reduced already."""


def options_text(arguments: Mapping[str, Any], partition: Partition, defaults: Mapping[str, Any]) -> str:
    """Return the options that must be equal on all ranks, as text."""
    own = {key: value for key, value in arguments.items() if key not in ("optimizer_class", "process_group", *defaults)}
    own |= {"partition": partition, "module": arguments["module"] is not None}
    return f"{call_text(arguments['optimizer_class'], (), defaults)}, {call_text(None, (), own)}"


def agree_on(
    ranks: Group,
    call: str,
    options: str,
    groups: Iterable[Mapping[str, Any]],
    known: Iterable[str] = (),
    fault: ShardTensorError | None = None,
) -> None:
    """Raise on every rank if options or parameters differ between ranks, or cannot be partitioned.

    Args:
        known: names of other parameters of the optimizer.
        fault: an error of this rank, for all ranks to raise.
    """
    texts = []
    seen = set(known)
    for group in groups:
        names = group.get("param_names") or [str(i) for i in range(len(group["params"]))]
        pairs = list(zip(names, group["params"], strict=True))
        own = call_text(None, (), {key: value for key, value in group.items() if key not in OWN_KEYS})
        texts.append(f"group {own}")
        if group.get("param_names") and (twice := [name for name in names if name in seen or names.count(name) > 1]):
            fault = LayoutError(f'two parameters are called "{twice[0]}"', fix="give each its own name")
        seen.update(names if group.get("param_names") else ())
        frozen = ", ".join(name for name, param in pairs if not param.requires_grad)
        texts.append(params_text({"params": pairs}) + (f"\nwithout gradients: {frozen}" if frozen else ""))
        sharded = [name for name, param in pairs if isinstance(param, ShardedTensor)]
        if sharded:
            fault = RuleError(
                "ZeroRedundancyOptimizer steps parameters that every rank holds whole, and some are sharded",
                {"sharded": some(sharded)},
                "step sharded parameters with ShardedOptimizer: it sends nothing",
            )
    agree(ranks, call, {"options": options, "parameters": "\n\n".join(texts)}, fault)


def one_axis(group: Group) -> Group:
    """Return the group as one axis of ranks."""
    return group if group.mesh is None else group.subgroup(list(group.ranks))
