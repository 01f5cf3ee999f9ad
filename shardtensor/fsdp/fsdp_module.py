"""`FSDPModule`: what a fully sharded module is besides what it was."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardtensor.errors import RuleError
from shardtensor.fsdp.copies import deep_copy
from shardtensor.fsdp.unit import Unit, unit_of, units_in
from shardtensor.fsdp.upkeep import take_in_if_ready


class FSDPModule:
    """The base that `fully_shard` gives a module's class."""

    _fsdp_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the class as it was: slices of containers call their class, and are not sharded."""
        return cls.__mro__[2](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._fsdp_unit
        args, kwargs = unit.enter(args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            unit.abandon()
            raise
        return unit.leave(output)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)  # type: ignore[misc]
        take_in_if_ready(self._fsdp_unit)
        return applied

    def __copy__(self) -> Any:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Return an independent copy, as fully sharded as this, on the same ranks. It sends nothing."""
        return deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuleError(
            "a fully sharded module cannot be pickled: it holds process groups",
            {"module": type(self).__name__},
            "save model.state_dict(), build the module anew, fully_shard it and load that",
        )

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in the backwards to come, or let them add up on each rank."""
        for _, unit in _units(self, recurse):
            unit.syncs = requires_gradient_sync


def _units(module: Any, recurse: bool) -> list[tuple[str, Unit]]:
    unit = unit_of(module)
    assert unit is not None
    return list(units_in(module)) if recurse else [("", unit)]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a fully sharded module that was of class `kind`."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]
