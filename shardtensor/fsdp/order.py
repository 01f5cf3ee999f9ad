"""The execution order: in which order units are gathered. The first pass of a kind records it, later ones follow it.

While they record an order, the ranks compare their next unit before they gather it: collectives of different units
would wait for each other, or mix values. Later passes send nothing to compare. A rank that skips a unit gathers it when
it passes its place in the order, and adds no gradients. A rank that calls a unit which is not in the rest of the order
waits for the others at a rendezvous in the store: if all call it, the pass continues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from struct import Struct
from zlib import crc32

from shardtensor.comm.agree import name_ranks, ranks_by_value
from shardtensor.comm.group import Group
from shardtensor.comm.primitives import timeout_of
from shardtensor.comm.rendezvous import Rendezvous, rendezvous_of
from shardtensor.errors import AbsentRankError, CallMismatchError

_NUMBER = Struct("<i")
_END = -1  # in place of the number of a unit: the end of a pass
_GRACE_S = 10.0  # between the timeouts of different ranks
_made: Counter[tuple[int, ...]] = Counter()  # orders of the same ranks; it gives a rendezvous one name on all ranks

FIXES = (
    "let every rank call the same modules in the same order, as with a loss of zero times what it does not need",
    "call fully_shard on a module that holds all of them instead, with find_unused=True: what a rank does not use"
    " counts as zero",
)


class ExecutionOrder:
    """The recorded orders, and the position of the present pass in its order.

    Args:
        group: all ranks that hold the units.
        title: returns the name of the unit with a number.
    """

    def __init__(self, group: Group, title: Callable[[int], str]) -> None:
        self._group, self._title = group, title
        self._orders: dict[Hashable, list[int] | None] = {}
        self._kind: Hashable = None
        self._order: list[int] = []
        self._next = 0
        self.is_recording = self.has_left_order = False
        ranks = tuple(group.ranks)
        _made[ranks] += 1
        self._purpose = f"fully_shard {_made[ranks]}"

    def clear(self) -> None:
        """Drop all recorded orders, so that the next passes record them anew."""
        self._orders.clear()

    def begin(self, kind: Hashable, expected: Callable[[], list[int]] | None = None) -> None:
        """Begin a pass; passes of one kind visit the same units.

        Args:
            expected: returns the order for a kind without a recorded order.
        """
        if expected is not None and kind not in self._orders:
            self._orders[kind] = expected()
        recorded = self._orders.get(kind)
        self._kind, self._next, self.has_left_order = kind, 0, False
        self.is_recording = recorded is None
        self._order = [] if recorded is None else recorded

    def visit(self, unit: int, is_gathered: bool) -> Sequence[int]:
        """Return the units to gather, one after the other, so that `unit` is gathered."""
        order, here = self._order, self._next
        if self.is_recording:
            if order[-1:] != [unit]:
                self._compare(unit)
                order.append(unit)
            return (unit,)
        if here < len(order) and order[here] == unit:
            self._next = here + 1
            return (unit,)
        if is_gathered:
            return ()
        if unit in order[here:]:
            self._next = order.index(unit, here) + 1
            return order[here : self._next]
        self._wait_for_all(f"{self._name()}: gathers {self._title(unit)}, which is not next in the recorded order")
        self._orders[self._kind] = None  # the next pass of this kind records
        self.is_recording = self.has_left_order = True
        self._order = [unit]
        return (unit,)

    def upcoming(self) -> Iterator[int]:
        """Return the units after the last one visited; none while the order is recorded."""
        return iter(()) if self.is_recording else islice(self._order, self._next, None)

    def end(self) -> Sequence[int]:
        """End a pass; return the units that other ranks visit after this rank's last one, to gather them here too."""
        if self.is_recording:
            self._compare(_END)
            if not self.has_left_order:
                self._orders[self._kind] = self._order
            self.is_recording, self._next = False, len(self._order)
            return ()
        rest, self._next = self._order[self._next :], len(self._order)
        return rest

    @property
    def recorded(self) -> list[int]:
        """The units of the pass, in order."""
        return self._order

    # -- ranks that call different units ------------------------------------------------------------------------------

    def _name(self) -> str:
        return self._kind[0] if isinstance(self._kind, tuple) else "pass"

    def _compare(self, unit: int) -> None:
        """Return if all ranks are at the same unit, or all at the end.

        Raises:
            CallMismatchError: they are not; all ranks raise it with the same text.
        """
        found = [_NUMBER.unpack(blob)[0] for blob in self._group.exchange(_NUMBER.pack(unit))]
        if len(set(found)) == 1:
            return
        where = {
            rank: self._title(number) if number != _END else f"the end of the {self._name()}"
            for rank, number in zip(self._group.ranks, found, strict=True)
        }
        facts = {name_ranks(ranks): text for text, ranks in ranks_by_value(where).items()}
        if self._order:
            facts["all came from"] = self._title(self._order[-1])
        raise CallMismatchError(
            f"ranks went different ways through fully sharded modules in a {self._name()}; nothing was moved",
            facts,
            list(FIXES),
        )

    def _wait_for_all(self, place: str, others_time_out: bool = True) -> None:
        """Wait until all ranks call this with the same `place`.

        Args:
            others_time_out: whether others may wait in a collective first, until the timeout of the group.

        Raises:
            CallMismatchError, AbsentRankError: they do not; all ranks raise it with the same text.
        """
        if self._rendezvous is None:  # a single rank, or simulated ranks: there a wrong collective raises
            self._group.exchange(_NUMBER.pack(crc32(place.encode()) >> 1))
            return
        others_timeout_s = timeout_of(self._group.process_group) if others_time_out else 0.0
        self._rendezvous.timeout_s = others_timeout_s + _GRACE_S
        self._rendezvous.wait("fully_shard", place)

    @cached_property
    def _rendezvous(self) -> Rendezvous | None:
        return rendezvous_of(self._group, self._purpose)

    def explain(self, unit: int | None = None) -> None:
        """Raise an error if the ranks wait in different places. Called when a collective timed out.

        Args:
            unit: the unit whose parameters or gradients this rank waited for. None if it still waits, for the end of a
                step: it then checks whether others wait for it.

        Raises:
            CallMismatchError: they do; all ranks raise it with the same text.
        """
        if self._rendezvous is None:
            return
        if unit is None and not self._rendezvous.is_awaited():
            return
        place = "the last step" if unit is None else f"{self._name()}: waits for the other ranks at {self._title(unit)}"
        try:
            self._wait_for_all(place, others_time_out=False)
        except AbsentRankError:
            return


class BackwardScope:
    """The forwards that the next backward belongs to.

    Args:
        group: all ranks that hold the modules.

    Attributes:
        called: the numbers of the modules that were called from outside; it identifies the backward.
        left: the numbers of modules whose backward may need their parameters, in the order of backward.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.called: tuple[int, ...] = ()
        self.left: list[int] = []
        self._kind: Hashable = None
        self._leaving: list[tuple[int, bool]] = []
        self._recorded: dict[Hashable, list[int]] = {}  # `left` by kind of forward
        self._since: dict[Hashable, int] = {}  # the last backward: forwards by kind, and the module called

    def enter(self, kind: Hashable, number: int | None) -> None:
        """Begin a forward of this kind in module `number`, which is None if no backward follows."""
        self._kind, self._leaving = kind, []
        if number is not None:
            self._since[kind] = number

    def leaves(self, number: int, is_needed: bool) -> None:
        """Record that the forward of a module ends, and whether a backward may need its parameters."""
        self._leaving.append((number, is_needed))

    def record(self, adds: bool) -> None:
        """Record which modules a backward needs on any rank: outputs may require a gradient on some ranks only.

        Args:
            adds: add them to those recorded before for this kind of forward.
        """
        needed = bytes([1, *(is_needed for _, is_needed in self._leaving)])
        on_any = list(map(any, zip(*self._group.exchange(needed), strict=True)))[1:]
        left = [number for (number, _), is_needed in zip(self._leaving, on_any, strict=True) if is_needed][::-1]
        before = self._recorded.get(self._kind, []) if adds else []
        self._recorded[self._kind] = list(dict.fromkeys(left + before)) if before else left

    def begin(self) -> None:
        """Begin a backward of the forwards since the last one; without any, of the same forwards again."""
        if self._since:
            self.called = tuple(sorted({*self._since.values()}))
            self.left = [number for kind in reversed(self._since) for number in self._recorded.get(kind, ())]
            self._since = {}
