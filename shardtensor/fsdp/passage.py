"""The order in which all ranks gather, equal on all of them by construction.

A first pass through the units asks: at each unit that has to be gathered the ranks exchange which one it is, and all
gather the first of those that any of them wants. What came of it is the order of later passes, which ask nothing: a
rank that skips a unit gathers it all the same when it goes past it. Units that no rank came to in the first pass have
their places in the order, too, in case that some rank comes to them later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from struct import Struct

from shardtensor.comm.group import Group

_DONE = -1
_TOLD = Struct("<ii")  # the unit that a rank wants, and its count


class Passage:
    """One pass through the units, numbered from 0.

    Args:
        orders: what earlier passes came to, by kind of pass; this one adds its own.
        kind: passes of one kind are taken to visit the same units.
        gather: gathers a unit, unless it is gathered; called on all ranks for the same units in the same order.
        units: those that may be visited, in the order in which they would be.
        pick: of the units that ranks want, the one that is gathered first.
        skip: called with a unit that this rank goes past without a visit, before that is gathered.
        count: something that this rank counts, and tells the others each time that they ask.
        hear: called then with the least that any rank has counted.
    """

    def __init__(
        self,
        orders: dict[Hashable, list[int]],
        kind: Hashable,
        group: Group,
        gather: Callable[[int], None],
        units: Callable[[], Sequence[int]],
        pick: Callable[[set[int]], int],
        skip: Callable[[int], None],
        count: Callable[[], int],
        hear: Callable[[int], None],
    ) -> None:
        self._orders, self._kind, self._group, self._gather = orders, kind, group, gather
        known = orders.get(kind)
        self.is_learning = known is None
        self.order: list[int] = [] if known is None else known
        self._units, self._pick, self._skip, self._count, self._hear = units, pick, skip, count, hear
        self._next = 0

    def visit(self, unit: int) -> None:
        """Have `unit` gathered, and what comes before it in the order; nothing where it is not in the order."""
        if self.is_learning:
            self._ask(unit)
        elif self._next < len(self.order) and self.order[self._next] == unit:
            self._next += 1
            self._gather(unit)
        elif unit in (ahead := self.order[self._next :]):
            place = ahead.index(unit) + 1
            self._pass(ahead[: place - 1])
            self._gather(unit)
            self._next += place

    def ahead(self, is_there: Callable[[int], bool]) -> int | None:
        """The unit after the last one visited, if it is known; past those that are there."""
        if self.is_learning:
            return None
        return next((unit for unit in islice(self.order, self._next, None) if not is_there(unit)), None)

    def reach(self, units: int) -> list[int]:
        """The units after the last one visited, as many, as far as they are known."""
        return [] if self.is_learning else self.order[self._next : self._next + units]

    def end(self) -> None:
        """Gather what other ranks visit beyond this one's last; the order is known from now on."""
        if self.is_learning:
            self._ask(_DONE)
            self.order = self._orders[self._kind] = completed(self.order, self._units())
            self._next = len(self.order)
        else:
            self._pass(self.order[self._next :])
            self._next = len(self.order)

    def _pass(self, units: Sequence[int]) -> None:
        for unit in units:
            self._skip(unit)
            self._gather(unit)

    def _ask(self, unit: int) -> None:
        """Gather what ranks want, one after the other, until `unit` was its turn; or until all are done."""
        while True:
            found = [_TOLD.unpack(blob) for blob in self._group.exchange(_TOLD.pack(unit, self._count()))]
            self._hear(min(count for _, count in found))
            wanted = {other for other, _ in found} - {_DONE}
            if not wanted:
                return
            first = self._pick(wanted)
            self.order.append(first)
            if first == unit:
                self._gather(first)
                return
            self._pass([first])


def completed(order: Sequence[int], units: Sequence[int]) -> list[int]:
    """Return `order` with those of `units` that it lacks, each after the last one that comes before it in `units`.

    Example:
        >>> completed([0, 2, 0, 2, 5], [0, 1, 2, 3])
        [0, 2, 0, 1, 2, 3, 5]
    """
    made, place = list(order), -1
    for unit in units:
        if unit in made:
            place = len(made) - 1 - made[::-1].index(unit)
        else:
            place += 1
            made.insert(place, unit)
    return made
