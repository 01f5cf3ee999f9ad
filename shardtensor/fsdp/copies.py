"""``copy.deepcopy`` of fully sharded modules."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import attrs
from torch import nn

from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.unit import Unit


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return an independent copy of a fully sharded module: own parameters, in ranges of their own; ties stay ties.

    What it learned in its forwards does not come along: the first forward of the copy learns it anew, on all ranks.
    """
    twin = object.__new__(type(module))
    memo[id(module)] = twin
    kind: Any = type(module).__mro__[2]  # as it was before fully_shard
    is_by_itself = hasattr(kind, "__deepcopy__") or not hasattr(kind, "__getstate__")  # parametrized modules, for one
    state = vars(module) if is_by_itself else module.__getstate__()
    state = copy.deepcopy({**state, "_fsdp_unit": vars(module)["_fsdp_unit"]}, memo)
    twin.__setstate__(state)
    return twin


def copy_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    """Return the unit of a module's copy."""
    twin = object.__new__(Unit)
    memo[id(unit)] = twin
    vars(twin).update(vars(unit))
    twin.modules = [copy.deepcopy(module, memo) for module in unit.modules]
    twin.module = twin.modules[0]
    twin.flats = [_copy_flat(flat, memo) for flat in unit.flats]
    for flat in twin.flats:
        flat.unit = weakref.ref(twin)
    twin.near = None if unit.near is None else unit.near.over(twin.flats)
    twin.forget()
    twin.is_running = 0
    twin.is_in_backward, twin.ahead = False, list(unit.ahead)
    return twin


def _copy_flat(flat: Flat, memo: dict[int, Any]) -> Flat:
    twin = object.__new__(type(flat))
    vars(twin).update(vars(flat))
    twin.entries = [
        attrs.evolve(
            entry,
            param=copy.deepcopy(entry.param, memo),
            homes=[(copy.deepcopy(owner, memo), name) for owner, name in entry.homes],
        )
        for entry in flat.entries
    ]
    twin.shells = [entry.param for entry in twin.entries]  # type: ignore[misc]
    twin.held = None
    twin.carry = flat.carry.fresh()
    twin.version = -1
    twin.repack()
    return twin


Unit.__deepcopy__ = copy_unit  # type: ignore[attr-defined]
