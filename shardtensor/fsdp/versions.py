"""Whether a gathered parameter that autograd saved still has its values: autograd checks that by version counters.

Modules compute with views of memory that units use in turns. While a unit's values are there, the counters of its views
are at the number of these values (`next_generation`); while they are not, at the unit's number for that. Autograd
compares the counter of a saved tensor when a backward uses it, so it refuses one without its values, however the
backward got there, and at no cost for an operation. The refusal is then said in the user's words: see `explained`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from operator import is_
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.autograd import Variable

from shardtensor.errors import RuleError

if TYPE_CHECKING:
    from shardtensor.fsdp.entry import Entry
    from shardtensor.fsdp.unit import Unit

_set_versions = torch._C._autograd._unsafe_set_version_counter
_SPACE = 64  # between generations; autograd counts a user's writes to a gathered parameter from there
_generations = count(1 << 20, _SPACE)  # above what the counters of other tensors come to
_absences = count(1 << 31)  # counters have 32 bits
_REFUSAL = re.compile(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+);")

_units: WeakSet[Unit] = WeakSet()


def next_generation() -> int:
    """Return a new number for values of parameters; no other values have it."""
    return next(_generations)


class Versions:
    """The counters of one unit's views.

    Attributes:
        present: where they stand.
        absent: where they stand while other values are in the unit's memory.
    """

    def __init__(self, unit: Unit, parts: Sequence[torch.Tensor]) -> None:
        self._parts = tuple(parts)
        self.absent = next(_absences)
        self.present = -1
        self.displaced()
        _units.add(unit)

    def displaced(self) -> None:
        """Note that other values come into the unit's memory."""
        set_versions([self], self.absent)

    def are_of(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether these are the counters of `parts`."""
        return len(parts) == len(self._parts) and all(map(is_, parts, self._parts))

    def has_one_of(self, sizes: Sequence[int]) -> bool:
        """Whether a tensor of `sizes` may be one of the parameters, or be one with its dims in another order."""
        return any(sorted(part.shape) == sorted(sizes) for part in self._parts)


def set_versions(of: Iterable[Versions], version: int, only_present: bool = False) -> None:
    """Set the counters of several units to `version` by one call of torch.

    Args:
        only_present: of those units alone that have some values in their memory.
    """
    parts: list[torch.Tensor] = []
    for one in of:
        there = one.present
        if there != version and not (only_present and there == one.absent):
            one.present = version
            parts += one._parts
    if parts:
        _set_versions(tuple(parts), (version,) * len(parts))


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, whose refusal of a parameter that is not gathered names the module."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_backward(*args, **kwargs)
        except RuntimeError as error:
            explanation = explained(error)
            if explanation is None:
                raise
            raise explanation from error


def watch_backward() -> None:
    """Have errors of autograd about gathered parameters explained from now on, in the whole process."""
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()


def explained(error: RuntimeError) -> RuleError | None:
    """Say why autograd refused a saved parameter of a fully sharded module; None for other errors."""
    found = _REFUSAL.search(str(error)) if type(error) is RuntimeError else None
    if found is None:
        return None
    sizes, version = [int(size) for size in found[1].split(",") if size.strip()], int(found[2])
    units = [unit for unit in _units if unit.versions.present == version]
    units = [unit for unit in units if unit.versions.has_one_of(sizes)] or units
    if not units:
        return None
    modules = sorted({unit.title for unit in units})
    facts = {"module" if len(modules) == 1 else "one of": ", ".join(modules[:4]), "saved tensor": tuple(sizes)}
    if version >> 31:
        return RuleError(
            "backward came to parameters of a fully sharded module that are no longer gathered, by another way than a "
            "result of the module's forward",
            facts,
            [
                "return what the loss is computed from in the results of the module's forward, rather than keep it in"
                " an attribute, a hook or a closure",
                "fully_shard(module, reshard_after_forward=False) keeps parameters gathered; second derivatives"
                " (create_graph=True) need it",
            ],
        )
    return _written(facts)


def written_too_early(entries: Iterable[Entry]) -> RuleError:
    """The refusal of a backward whose parameters are no longer those of the forward."""
    return _written({"parameters": ", ".join([entry.name for entry in entries][:4])})


def _written(facts: Mapping[str, Any]) -> RuleError:
    return RuleError(
        "parameters were written between a forward and its backward",
        facts,
        "call backward before the optimizer steps or values are loaded",
    )
