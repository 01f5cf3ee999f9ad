"""State dicts by parameter name: match saved state to the groups of an optimizer, without tensor operations."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from shardtensor.errors import LayoutError, ShardTensorError, some
from shardtensor.tensor.sharded_tensor import ShardedTensor

NOT_LOADED = "nothing has been loaded"


def match(
    state_dict: Mapping[str, Any], own: Sequence[Sequence[str]], aliases: Mapping[str, str]
) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    """Find the saved state and hyperparameters of each group.

    A group gets the hyperparameters of the saved group with its names, at any place in the list; empty groups are
    matched in order.

    Args:
        state_dict: with ``state`` and ``param_groups``, by name or by torch's numbers.
        own: the names in each group of the optimizer.
        aliases: from other names of tied parameters to the name in `own`.

    Returns:
        the state by name (other keys unchanged), and the hyperparameters of each group of `own`.

    Raises:
        LayoutError: a name is missing or unknown, or one group has two different saved sets of hyperparameters.

    Example:
        >>> saved = {"state": {}, "param_groups": [{"params": ["b"], "lr": 2.0}, {"params": ["a"], "lr": 1.0}]}
        >>> match(saved, [["a"], ["b"]], {})[1]
        [{'lr': 1.0}, {'lr': 2.0}]
    """
    groups = state_dict["param_groups"]
    names = _names(groups, own)

    def name_of(key: Any) -> Any:
        name = names.get(key, key)
        return aliases.get(name, name)

    state = {
        name_of(key): dict(values) if isinstance(values, Mapping) else values
        for key, values in state_dict["state"].items()
    }
    options = [{key: x for key, x in group.items() if key not in ("params", "param_names")} for group in groups]
    empty = iter([found for found, group in zip(options, groups, strict=True) if not group["params"]])
    saved = {name_of(key): found for found, group in zip(options, groups, strict=True) for key in group["params"]}
    own_names = [name for group in own for name in group]
    missing = [name for name in own_names if name not in saved]
    unknown = [name for name in saved if name not in set(own_names)]
    if missing or unknown:
        raise LayoutError(
            f"the state dict is of other parameters; {NOT_LOADED}",
            {key: some(value) for key, value in (("missing", missing), ("unknown", unknown)) if value},
            "rename its keys, or leave these parameters out on both sides",
        )
    return state, [copy.deepcopy(_options(group, saved) if group else next(empty, {})) for group in own]


def _names(groups: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> dict[Any, str]:
    """Return the names for torch's numbers; empty if the dict is keyed by name."""
    keys = [key for group in groups for key in group["params"]]
    if not any(isinstance(key, int) for key in keys):
        return {}
    if all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        return dict(zip(keys, (name for group in groups for name in group["param_names"]), strict=True))
    if [len(group["params"]) for group in groups] != [len(group) for group in own]:
        raise LayoutError(
            f"a state dict keyed by number has other groups than this optimizer; {NOT_LOADED}",
            {"saved": [len(group["params"]) for group in groups], "here": [len(group) for group in own]},
            "save it from an optimizer made with named_parameters(), so that it can be matched by name",
        )
    return dict(zip(keys, (name for group in own for name in group), strict=True))


def _options(group: Sequence[str], saved: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the saved hyperparameters of a group, which must be the same for all of its parameters."""
    first = saved[group[0]]
    for name in group:
        other = saved[name]
        differing = {
            key: f"{first.get(key)} for {group[0]}, {other.get(key)} for {name}"
            for key in first.keys() | other.keys()
            if other is not first and not _equal(first.get(key), other.get(key))
        }
        if differing:
            raise LayoutError(
                f"parameters of one group were saved with different hyperparameters; {NOT_LOADED}",
                differing,
                "make the groups as they were when it was saved",
            )
    return first


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return bool(torch.as_tensor(a == b).all())
    return a == b


def by_name(optimizer: optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state and groups by name; `names` maps the id of each parameter to its name."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    places = {id(param): i for i, param in enumerate(params)}  # the order of the groups
    entries = sorted(optimizer.state.items(), key=lambda entry: places.get(id(entry[0]), len(places)))
    state = {names.get(id(key), key): dict(values) for key, values in entries if len(values)}
    return {"state": state, "param_groups": groups_by_name(optimizer, names)}


def groups_by_name(optimizer: optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the hyperparameters of an optimizer's groups, with the names of their parameters."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [names[id(param)] for param in group["params"]]})
    return groups


def numbered(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same state dict keyed by torch's numbers: the positions of the parameters in the groups."""
    groups = state_dict["param_groups"]
    numbers = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    return {
        **state_dict,
        "state": {numbers.get(key, key): values for key, values in state_dict["state"].items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def match_and_check(
    state_dict: Mapping[str, Any],
    own: Sequence[Sequence[str]],
    aliases: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]], ShardTensorError | None]:
    """Return the results of `match`, after a `check` against global shapes, or the error for all ranks to raise."""
    try:
        state, options = match(state_dict, own, aliases)
        if shapes is not None:
            check(state, shapes)
    except ShardTensorError as fault:
        return {}, [], fault
    return state, options, None


def check(state: Mapping[Any, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that state belongs to known parameters, and that its tensors are 0-d or have the global shape.

    Raises:
        LayoutError: a name is unknown, or a tensor has another shape.
    """
    unknown = [name for name in state if name not in shapes]
    if unknown:
        raise LayoutError(f"the state dict has state of other parameters; {NOT_LOADED}", {"unknown": some(unknown)})
    for name, shape in shapes.items():
        for key, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) != shape:
                raise LayoutError(
                    f'the saved "{key}" of parameter "{name}" has another shape; {NOT_LOADED}',
                    {"saved": tuple(value.shape), "needed": shape},
                    "load a state dict of this model; whole tensors have the global shape",
                )


def outline(state: Mapping[Any, Any]) -> str:
    """Return the keys, shapes and specs of all values, as text that must be equal on all ranks before a load."""
    lines = []
    for name, values in state.items():
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, torch.Tensor):
                spec = value.sharding_spec() if isinstance(value, ShardedTensor) else "whole"
                lines.append(f"{name}.{key} {tuple(value.shape)} {spec}")
            else:
                lines.append(f"{name}.{key}")
    return "\n".join(sorted(lines))
