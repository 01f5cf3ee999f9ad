"""Options of `fully_shard`: precision, offloading, which modules are units, `reshard_after_forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError

Reshard = bool | int | None
"""``reshard_after_forward``: a bool, or how many consecutive ranks hold the unit after it; None for the default."""


@attrs.frozen
class MixedPrecisionPolicy:
    """The dtypes of a fully sharded module. Shards, their gradients and optimizer state keep the parameters' dtype.

    Args:
        param_dtype: the dtype in which parameters are gathered and used; None keeps their dtype.
        reduce_dtype: the dtype in which gradients are reduced, over tensor-parallel ranks too (except in compiled
            code); None for the gradients' own.
        output_dtype: the dtype to cast floating-point outputs of the module to; None to leave them.
        cast_forward_inputs: cast floating-point inputs of the module to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@attrs.frozen
class OffloadPolicy:
    """Keep shards on the device."""


@attrs.frozen
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, their gradients and so the optimizer's state on the CPU. To gather, shards are copied to the device.

    Args:
        pin_memory: keep them in pinned memory, which lets copies overlap with the device's work.
    """

    pin_memory: bool = True


OWN_PRECISION, ON_DEVICE = MixedPrecisionPolicy(), OffloadPolicy()
"""The default policies."""


class ModuleWrapPolicy:
    """Make every module of these classes a unit of its own.

    Example:
        >>> policy = ModuleWrapPolicy({nn.Linear})
        >>> [name for name, module in nn.Sequential(nn.Linear(1, 1), nn.ReLU()).named_modules() if policy(module)]
        ['0']
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = tuple(module_classes)

    def __call__(self, module: nn.Module) -> bool:
        return isinstance(module, self.module_classes)


def selects(policy: Callable[..., Any], module: nn.Module) -> bool:
    """Whether a policy makes a module a unit; it may be one of torch's, which also take ``recurse``."""
    if "recurse" in inspect.signature(policy).parameters:
        return bool(policy(module, recurse=False, nonwrapped_numel=sum(param.numel() for param in module.parameters())))
    return bool(policy(module))


def read_reshard(given: Reshard, group: Group) -> Reshard:
    """Return ``reshard_after_forward`` for a shard group as None, a bool, or a divisor of its size.

    Raises:
        LayoutError: it does not divide the size.
    """
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, int) or given < 1 or group.size % given:
        raise LayoutError(
            f"reshard_after_forward={given!r} does not divide the ranks that hold a copy",
            {"ranks": group.size},
            [
                "give a divisor of their number: so many consecutive ranks hold the unit after forward",
                "give True (all of them) or False (each rank)",
            ],
        )
    return False if given == 1 else True if given == group.size else given
