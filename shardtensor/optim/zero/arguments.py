"""The arguments of a `ZeroRedundancyOptimizer`: parameters, groups of them and their hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

OWN_KEYS = frozenset({"params", "param_names"})
"""Keys of a group that differ between this optimizer and the inner one, which has this rank's part."""


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy the hyperparameters of each group."""
    for new, group in zip(source, target, strict=True):
        group.update({key: value for key, value in new.items() if key not in OWN_KEYS})


def as_list(params: Any) -> list[Any]:
    """Return the parameters or groups as a list, checked.

    Raises:
        TypeError, ValueError: as torch's class raises them.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}"
        )
    members = list(params)
    if not members:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    if all(isinstance(member, dict) for member in members):
        if any("params" not in member for member in members):
            raise ValueError(
                "Each parameter group passed-in via `params` must have a 'params' key mapping to the parameters in the "
                "group"
            )
        members = [{**member, "params": members_of(member["params"])} for member in members]
        tensors = [tensor for member in members for tensor in member["params"]]
    else:
        tensors = members
    tensors = [tensor[1] if isinstance(tensor, tuple) and len(tensor) == 2 else tensor for tensor in tensors]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise TypeError("`params` argument should be an iterable of Tensors, (name, Tensor) pairs or dicts")
    types = sorted({torch.typename(tensor) for tensor in tensors})
    if len(types) > 1 or any(tensor.is_sparse for tensor in tensors):
        raise ValueError(
            "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got "
            + " and ".join(types)
        )
    return members


def members_of(params: Any) -> list[Any]:
    """Return the parameters of a group, which may be a generator, as a list."""
    return [params] if isinstance(params, torch.Tensor) else list(params)
