"""What undoes `fully_shard`: the module is what it was; its parameters stay as they lie, ShardedTensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardtensor.fsdp.parts import is_part_hook
from shardtensor.fsdp.unit import Unit, part_of, unit_of
from shardtensor.fsdp.upkeep import after_load


def release(module: nn.Module) -> None:
    """Take `fully_shard` off a module and all modules in it. Sends nothing; called between passes, on all ranks.

    Parameters are no longer gathered: `ShardedTensor.full_tensor` gives their values, and gradients stay beside them.

    Example:
        >>> from shardtensor.fsdp import FSDPModule, fully_shard
        >>> linear = fully_shard(nn.Linear(2, 2))
        >>> release(linear)
        >>> isinstance(linear, FSDPModule), type(linear.weight).__name__
        (False, 'ShardedTensor')
    """
    for owner in module.modules():
        unit, part = unit_of(owner), part_of(owner)
        if part is not None:
            _let_go(part)
            del vars(owner)["_fsdp_part"]
            for hooks in (owner._forward_pre_hooks, owner._forward_hooks):
                for key in [key for key, hook in hooks.items() if is_part_hook(hook)]:
                    _remove(owner, key)
        if unit is not None:
            _let_go(unit)
            del vars(owner)["_fsdp_unit"]
            owner.__class__ = type(owner).__mro__[2]
            for key in [key for key, hook in owner._load_state_dict_post_hooks.items() if hook is after_load]:
                del owner._load_state_dict_post_hooks[key]


def _let_go(unit: Unit) -> None:
    for flat in unit.flats:
        flat.show_shells()
        for shell in flat.shells:
            shell._flat = None


def _remove(owner: nn.Module, key: int) -> None:
    tables: tuple[Any, ...] = (
        owner._forward_pre_hooks,
        owner._forward_pre_hooks_with_kwargs,
        owner._forward_hooks,
        owner._forward_hooks_with_kwargs,
        owner._forward_hooks_always_called,
    )
    for table in tables:
        table.pop(key, None)
