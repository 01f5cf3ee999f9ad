"""`Scope`: the units that a backward may come to."""

from __future__ import annotations

from collections.abc import Sequence

from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.unit import Unit, units_in


class Scope:
    """The units in the modules that were called from outside since the last backward, or before that one.

    Attributes:
        entered: the numbers of the units of those modules; it tells scopes apart.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.entered: tuple[int, ...] = ()
        self._since: set[int] = set()
        self._known: dict[tuple[int, ...], list[Unit]] = {}

    def enter(self, unit: Unit) -> None:
        """A forward of this unit has begun that a backward may follow."""
        self._since.add(unit.index)

    def begin(self) -> None:
        """A backward begins: of the forwards since the last one, or else of the same."""
        if self._since:
            self.entered, self._since = tuple(sorted(self._since)), set()

    def units(self) -> list[Unit]:
        """Those that the backward may come to, in the order of the model."""
        return self.under(self.entered)

    def under(self, entered: tuple[int, ...]) -> list[Unit]:
        """The units in the modules of these, these among them."""
        if entered not in self._known:
            modules = [module for index in entered for module in self._units[index].modules]
            inside = {unit.index for module in modules for _, unit in units_in(module)}
            self._known[entered] = [unit for unit in self._units if unit.index in inside]
        return self._known[entered]

    def flats(self) -> list[Flat]:
        """Those of the units."""
        return [flat for unit in self.units() for flat in unit.flats]

    def gathered_again(self) -> list[int]:
        """The numbers of the units that the backward may have to gather again, in its order."""
        again = [
            unit.index
            for unit in self.units()
            if not unit.stays_gathered and any(any(flat.trains) for flat in unit.flats)
        ]
        return again[::-1]
