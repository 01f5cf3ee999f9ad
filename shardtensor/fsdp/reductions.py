"""`Reductions`: the gradients of flats, packed and summed over the ranks in one order, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import attrs
import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.flat_gradients import Packing
from shardtensor.fsdp.passage import completed
from shardtensor.fsdp.streams import Streams
from shardtensor.fsdp.used import Uses

_will_run = torch._C._will_engine_execute_node

BUFFERS = 2
"""Reductions on their way at a time, where nothing else is asked."""
_KEPT = 1 << 24  # bytes; what is larger is given back after each backward, for a loss needs the most memory just before


@attrs.define(eq=False)
class _Flight:
    """A reduction on its way: of which flat, which parameters have a gradient, where, what to wait for."""

    flat: Flat
    used: list[bool]
    packing: Packing
    pending: Pending | None = None
    grad: torch.Tensor | None = None


class Reductions:
    """Sends the gradients of flats in the reverse of the order in which the forward first used them."""

    def __init__(self, flats: Sequence[Flat], streams: Streams, used: Uses, buffers: int = BUFFERS) -> None:
        self.flats, self._streams, self.uses = list(flats), streams, used
        self.lane = streams.lane()
        self._met: list[int] = []
        self._order: list[int] = []
        self._expectations: dict[Hashable, dict[int, int]] = {}
        self._suit: Hashable = None
        self._known: dict[Hashable, tuple[list[int], list[int], dict[Hashable, dict[int, int]]]] = {}
        self._expected: list[int] = []
        self._places: dict[int, int] = {}  # in `_expected`, by number
        self._comes: list[bool] = []  # for each expected: whether this rank's backward brings it
        self._passed: set[int] | None = None  # where some do not come: those that may be sent without
        self._nested: set[int] = set()  # that come in a backward inside of a backward
        self._landed: dict[int, torch.Tensor] | None = None
        self._next = 0
        # Whether some gradients may wait for a later backward.
        self._is_carrying = any(flat.carry.is_waiting for flat in flats)
        self._memory_size = max((flat.gradient_bytes for flat in flats), default=0)
        self._dtypes = _dtypes_of(flats)
        self.resize(buffers)
        for position, flat in enumerate(flats):
            flat.position, flat.on_gradients = position, self.arrived

    def resize(self, buffers: int) -> None:
        """Have as many reductions on their way at a time; between two backwards."""
        self.buffers = buffers
        self._flights: list[_Flight | None] = [None] * buffers
        self._events = [self._streams.event() for _ in range(buffers)]
        self._memory: dict[int, torch.Tensor] = {}
        self._packings: dict[tuple[int, int], Packing] = {}
        self._turn = 0

    def fits(self) -> bool:
        """Whether flats compute and reduce in the dtypes still that this was made for."""
        return self._dtypes == _dtypes_of(self.flats)

    def suit(self, trains: Hashable) -> None:
        """Go by what was learned when these parameters were trained."""
        self._known[self._suit] = (self._met, self._order, self._expectations)
        self._suit = trains
        self._met, self._order, self._expectations = self._known.get(trains, ([], [], {}))

    # -- the order --------------------------------------------------------------------------------------------------

    def numbers(self, flats: Iterable[Flat]) -> list[int]:
        """The numbers of some flats."""
        return [flat.position for flat in flats]

    def used(self, flats: Sequence[Flat]) -> None:
        """Take note that a forward uses these now."""
        self._met += [number for number in self.numbers(flats) if number not in self._met]

    def agree_on_use(self, group: Group) -> None:
        """Settle the order on all ranks, from what each noted; what none has used yet has its place, too."""
        found = group.exchange_objects(self._met)
        order = dict.fromkeys(number for met in found for number in met)
        self._order = completed(list(order), range(len(self.flats)))[::-1]
        self._expectations = {}

    def begin(self, scope: Hashable, among: Callable[[], Sequence[Flat]]) -> None:
        """At the start of a backward: know what comes, and what this rank has no gradients of.

        Args:
            scope: what tells backwards from others.
            among: the flats that it may reach; those of them that train are reduced, on all ranks.
        """
        self.uses.check(waits=True)
        self._next = 0
        places = self._expectations.get(scope)
        if places is None:
            inside = set(self.numbers(among()))
            expected = [i for i in self._order if i in inside and any(self.flats[i].trains)]
            places = self._expectations[scope] = {number: place for place, number in enumerate(expected)}
        self._places, self._expected = places, list(places)
        self._comes = [_will_run(self.flats[number].node) for number in places]  # 60 ns each
        self._passed = None
        if not all(self._comes):
            self._comes = [comes or i in self._nested for comes, i in zip(self._comes, places, strict=True)]
            self._passed = set()
        self._landed = {} if self.uses.asks else None

    def pass_by(self, flats: Sequence[Flat]) -> None:
        """Send zeros for those of these flats that this rank has no gradients of, if it is their turn.

        Other ranks that wait for them may be what this one waits for.
        """
        if self._passed is not None:
            self._passed.update(self.numbers(flats))
            self._send_those_there()

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, flat: Flat, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of a flat's whole parameters, and send what is next in order and there."""
        flat.hold(grads)
        if not flat.syncs:
            self._is_carrying = True
            return
        number = flat.position
        place = self._places.get(number, -1)
        if place == self._next and self._passed is None:
            self._next += 1
            self._send(flat)
            if self._next < len(self._expected):
                following = self.flats[self._expected[self._next]]
                if following.held is not None or not following.syncs:
                    self._send_those_there()
            return
        if self._passed is not None and place >= 0 and not self._comes[place]:
            self._nested.add(number)
        if place < self._next:
            self._send(flat)
        else:
            self._send_those_there()

    def _send_those_there(self) -> None:
        while self._next < len(self._expected):
            number = self._expected[self._next]
            flat = self.flats[number]
            if flat.held is None and flat.syncs:
                passed = self._passed
                if passed is None or self._comes[self._next] or number not in passed:
                    return
            self._next += 1
            if flat.syncs:
                self._send(flat)

    def end(self) -> None:
        """At the end of a backward: send what is left, zeros where nothing came, and wait for all."""
        for number in self._expected[self._next :]:
            if self.flats[number].syncs:
                self._send(self.flats[number])
        self._next = len(self._expected)
        self._land_all()
        if self._is_carrying:
            self._send_carried()
        self.lane.join()
        if self.uses.pattern:  # else nothing was reduced, on any rank
            if self._landed is not None:
                self._attach_missed(self._landed)
            with self.lane:
                self.uses.end()
        if self._memory_size > _KEPT:
            self._memory, self._packings = {}, {}

    def _attach_missed(self, landed: dict[int, torch.Tensor]) -> None:
        """Make what other ranks brought the gradients of parameters that only they used."""
        for number, missed in self.uses.settle().items():
            flat = self.flats[number]
            if number in landed:
                flat.attach(landed[number], missed)
                self._run_hooks(flat, missed)
        self._landed = None

    def _send_carried(self) -> None:
        """Send what waits from earlier backwards for parameters that this one did not use."""
        for flat in self.flats:
            if flat.syncs and flat.carry.is_due:
                self._send(flat)
        self._land_all()
        self._is_carrying = any(flat.carry.is_waiting for flat in self.flats)

    def _land_all(self) -> None:
        for _ in self._flights:
            self._land(self._turn)
            self._turn = (self._turn + 1) % self.buffers

    def drop(self) -> None:
        """Forget what a broken backward left; what earlier ones left to wait stays."""
        for flat in self.flats:
            flat.held = None
        self.uses.drop()
        for flight in self._flights:
            if flight is not None and flight.pending is not None:
                flight.pending.wait()  # or it would write into memory of the next
        self.lane.join()
        self._flights = [None] * self.buffers

    def _send(self, flat: Flat) -> None:
        turn = self._turn
        self._land(turn)
        self._turn = (turn + 1) % self.buffers
        packing = self._packing(flat, turn)
        used = flat.pack(packing)
        self.uses.pattern.append((flat.position, used))
        if not self._streams.is_cuda:
            self._flights[turn] = _Flight(flat, used, packing, flat.reduce(packing))
            return
        self.lane.follow()
        with self.lane:
            flat.reduce(packing).wait()
            grad = flat.receive(packing.own, used)
            self.lane.mark(self._events[turn])
        self._flights[turn] = _Flight(flat, used, packing, grad=grad)

    def _land(self, turn: int) -> None:
        flight, self._flights[turn] = self._flights[turn], None
        if flight is None:
            return
        flat = flight.flat
        if flight.pending is None:
            self._streams.wait(self._events[turn])
            if flat.is_offloaded:
                self._events[turn].synchronize()  # hooks and the optimizer read gradients on the CPU
        else:
            flight.pending.wait()
            flight.grad = flat.receive(flight.packing.own, flight.used)
        if flight.grad is None:
            self._is_carrying = True
            return
        flat.attach(flight.grad, flight.used)
        if self._landed is not None:
            self._landed[flat.position] = flight.grad
        if flat.pieces.has_hooks:
            self._run_hooks(flat, flight.used)

    def _run_hooks(self, flat: Flat, used: list[bool]) -> None:
        flat.show_shells()  # the module's backward is done with the others
        flat.run_hooks(used)

    def _packing(self, flat: Flat, turn: int) -> Packing:
        place = (turn, flat.position)
        if place not in self._packings:
            if turn not in self._memory:
                device = self._streams.device
                self._memory[turn] = torch.empty(self._memory_size, dtype=torch.uint8, device=device)
            self._packings[place] = flat.packing_in(self._memory[turn])
        return self._packings[place]


def _dtypes_of(flats: Sequence[Flat]) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(flat.compute_dtype, flat.reduce_dtype) for flat in flats]
