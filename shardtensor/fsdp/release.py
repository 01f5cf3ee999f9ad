"""What undoes `fully_shard`, and what frees the memory that it gathers into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from shardtensor.errors import RuleError
from shardtensor.fsdp.outside import part_from_flat
from shardtensor.fsdp.unit import Unit, unit_of, units_in
from shardtensor.fsdp.upkeep import after_load

if TYPE_CHECKING:
    from shardtensor.fsdp.schedule import Schedule


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
        unit = unit_of(owner)
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
            part_from_flat(shell)


def free_gathered(module: nn.Module) -> None:
    """Free the memory that units of a module are gathered into, and that their gradients are reduced in.

    It stays from pass to pass otherwise: call this after evaluation, say, to have it for something else. The next
    forward makes it anew. Sends nothing; called on the outermost fully sharded module, between passes, on all ranks.

    Raises:
        RuleError: a forward or a backward is going on, or a graph has saved what lies in that memory. Nothing has
            changed. A graph that saved nothing there raises at its own backward.

    Example:
        >>> import torch
        >>> from shardtensor.fsdp import free_gathered, fully_shard
        >>> layer = fully_shard(nn.Linear(2, 2))
        >>> with torch.no_grad():
        ...     y = layer(torch.ones(1, 2))
        >>> free_gathered(layer)
    """
    found = (unit.schedule for _, unit in units_in(module))
    schedules = {id(schedule): schedule for schedule in found if schedule is not None}.values()
    for schedule in schedules:
        if schedule.is_running() or not all(unit.slot.is_idle for unit in schedule.units):
            raise RuleError(
                "the memory of gathered parameters is in use: a forward has still to have its backward",
                {"module": schedule.units[0].title},
                "call backward first, or drop the results of that forward",
            )
    for schedule in schedules:
        _free(schedule)


def _free(schedule: Schedule) -> None:
    for unit in schedule.units:
        schedule.reshard(unit)
        unit.finish()
    schedule.gathers.join()
    leases = {id(unit.slot.lease): unit.slot.lease for unit in schedule.units}.values()
    schedule.reductions.resize(schedule.reductions.buffers)
    schedule.is_current = False
    for unit in schedule.units:
        unit.forget()
    for lease in leases:
        lease.end()
