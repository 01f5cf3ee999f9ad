"""`Reductions`: the gradients of flats, packed and summed over the ranks in one order, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.fsdp.carry import Grads
from shardtensor.fsdp.coming import Coming
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.load import Load, Packing, loads_of
from shardtensor.fsdp.passage import completed
from shardtensor.fsdp.streams import Streams
from shardtensor.fsdp.used import Uses

_in_backward = torch._C._current_graph_task_id

BUFFERS = 2
"""Reductions on their way at a time, where nothing else is asked."""
_KEPT = 1 << 24  # bytes; what is larger is given back after each backward, for a loss needs the most memory just before


@attrs.define(eq=False)
class _Flight:
    """A reduction on its way: of what, which parameters of each flat have a gradient, where, what to wait for."""

    load: Load
    used: list[list[bool]]
    packing: Packing
    pending: Pending | None = None
    grads: list[torch.Tensor | None] | None = None


class Reductions:
    """Sends the gradients of flats in the reverse of the order in which the forward first used them."""

    def __init__(
        self, flats: Sequence[Flat], streams: Streams, used: Uses, touch: Callable[[], None], buffers: int = BUFFERS
    ) -> None:
        self.flats, self._streams, self.uses = list(flats), streams, used
        self._touch = touch  # begins a backward that has not begun
        self.lane = streams.lane()
        self._met: list[int] = []
        self._order: list[int] = []
        self._expectations: dict[Hashable, _Expected] = {}
        self._suit: Hashable = None
        self._known: dict[Hashable, tuple[list[int], list[int], dict[Hashable, _Expected]]] = {}
        self._expected: list[Load] = []
        self._places: dict[int, int] = {}  # in `_expected`, by number of the flat
        self._coming = Coming()
        self._late: set[int] = set()  # whose gradients came after their turn, and wait for all ranks to know
        self._landed: dict[int, torch.Tensor] | None = None
        self._next, self._task = 0, -1  # the load that is sent next; autograd's number of the backward
        self._sent = self._sent_by_all = 0
        self._is_careful = False  # whether it waits for no load but those that all have sent
        # Whether some gradients may wait for a later backward.
        self._is_carrying = any(flat.carry.is_waiting for flat in flats)
        self._dtypes = _dtypes_of(flats)
        for position, flat in enumerate(flats):
            flat.position, flat.on_gradients = position, self.arrived
        self.resize(buffers)

    def resize(self, buffers: int) -> None:
        """Have as many reductions on their way at a time, of what travels together now; between two backwards."""
        self.buffers = buffers
        self._flights: list[_Flight | None] = [None] * buffers
        self._events = [self._streams.event() for _ in range(buffers)]
        self._memory: dict[int, torch.Tensor] = {}
        self._packings: dict[tuple[int, tuple[int, ...]], Packing] = {}
        self._turn = 0
        self._expectations = {}
        self._known = {suit: (met, order, {}) for suit, (met, order, _) in self._known.items()}
        self._alone = [Load([flat]) for flat in self.flats]
        loads = [*self._alone, *loads_of(self.flats)]
        self._memory_size = max((load.size_bytes + load.apart_bytes for load in loads), default=0)

    def fits(self) -> bool:
        """Whether flats compute and reduce in the dtypes still that this was made for."""
        return self._dtypes == _dtypes_of(self.flats)

    def suit(self, trains: Hashable) -> None:
        """Go by what was learned when these parameters were trained."""
        self._known[self._suit] = (self._met, self._order, self._expectations)
        self._suit = trains
        self._met, self._order, self._expectations = self._known.get(trains, ([], [], {}))

    # -- the order --------------------------------------------------------------------------------------------------

    def hide(self, flats: Iterable[Flat]) -> None:
        """Take note that a forward computes with these where autograd records nothing, as in a reentrant checkpoint."""
        self._coming.hide(self.numbers(flats))

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

    def count(self) -> int:
        """How many loads this rank has sent in this backward."""
        return self._sent

    def hear(self, least: int) -> None:
        """Learn how many loads all ranks have sent: those can be waited for."""
        if self._is_careful:
            self._sent_by_all = least
            self._send_those_there()

    def begin(self, scope: Hashable, among: Callable[[], Sequence[Flat]], is_learning: bool) -> None:
        """At the start of a backward: know what comes, and what this rank has no gradients of.

        Args:
            scope: what tells backwards from others.
            among: the flats that it may reach; those of them that train are reduced, on all ranks.
            is_learning: whether ranks ask each other in which order to gather. Where they are not taken to use the
                same, a rank that waited for a reduction then, which another sends later, would leave that waiting for
                an answer.
        """
        self.uses.check(waits=True)
        self._next, self._task = 0, _in_backward()
        self._sent = self._sent_by_all = 0
        self._is_careful = is_learning and self.uses.is_exact
        if scope not in self._expectations:
            inside = set(self.numbers(among()))
            flats = [self.flats[i] for i in self._order if i in inside and any(self.flats[i].trains)]
            self._expectations[scope] = _Expected.of(flats)
        expected = self._expectations[scope]
        self._expected, self._places = expected.loads, expected.places
        self._coming.begin(expected.places, expected.nodes())
        is_settled = self.uses.asks and any([flat.syncs for load in self._expected for flat in load.flats])
        self._landed = {} if is_settled else None

    def pass_by(self, flats: Sequence[Flat]) -> None:
        """Send zeros for those of these flats that this rank has no gradients of, if it is their turn.

        Other ranks that wait for them may be what this one waits for.
        """
        if self._coming.missing:
            self._coming.pass_by(self.numbers(flats))
            self._send_those_there()

    def skip(self, flats: Sequence[Flat]) -> None:
        """Send zeros for these, which this rank's backward goes past without coming to them."""
        if self._coming.skip(self.numbers(flats)):
            self._send_those_there()

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, flats: Sequence[Flat], grads: Sequence[Grads]) -> None:
        """Take the gradients of whole parameters of flats that travel together, and send what is next and there.

        A backward inside of this one, of a reentrant checkpoint, brings those of some of them, and others come later.
        """
        self._touch()
        is_inside = _in_backward() != self._task
        for flat, own in zip(flats, grads, strict=True):
            place = self._places.get(flat.position, -1)
            if all([grad is None for grad in own]):
                is_unused = place >= self._next and not is_inside and flat.position not in self._coming.hidden
                if is_unused and flat.syncs:
                    flat.hold(own)
                continue
            flat.hold(own)
            if not flat.syncs:
                self._is_carrying = True
                continue
            if place >= self._next:
                if self._coming.hidden:
                    self._coming.reach(place)
            elif self._landed is not None:
                self._late.add(flat.position)
            else:
                self._send(self._alone[flat.position])
        self._send_those_there()

    def _send_those_there(self) -> None:
        while self._next < len(self._expected):
            load = self._expected[self._next]
            if not load.are_there(self._coming.is_without):
                return
            if self._is_careful and self._sent - self._sent_by_all >= self.buffers:
                return
            self._next += 1
            self._send(load)

    def end(self) -> None:
        """At the end of a backward: send what is left, zeros where nothing came, and wait for all."""
        self._is_careful = False
        for load in self._expected[self._next :]:
            self._send(load)
        self._next = len(self._expected)
        self._land_all()
        if self._is_carrying:
            self._send_carried()
        if self._landed is not None:
            self._settle(self._landed)
        self._coming.end()
        self.lane.join()
        if self.uses.pattern:  # else nothing was reduced, on any rank
            with self.lane:
                self.uses.end()
        if self._memory_size > _KEPT:
            for memory in self._memory.values():
                memory.untyped_storage().resize_(0)  # what lies in it finds it again: a fifth of a millisecond each

    def _settle(self, landed: dict[int, torch.Tensor]) -> None:
        """Send what came late on any rank, and take what others brought for parameters that only they used."""
        late = {number: [grad is not None for grad in self.flats[number].held or ()] for number in self._late}
        self._late.clear()
        to_send, missed_of = self.uses.settle(late)
        used_before = self.uses.used() if to_send else []
        for number in to_send:
            if number in late and number in landed:  # others brought some before this rank did
                first = [now and not before for now, before in zip(late[number], used_before[number], strict=True)]
                self.flats[number].attach(landed[number], first)
            self._send(self._alone[number], used_before[number])
        self._land_all()
        for number, missed in missed_of.items():
            flat = self.flats[number]
            if number in landed:
                flat.attach(landed[number], missed)
                self._run_hooks(flat, missed)
        self._landed = None

    def _send_carried(self) -> None:
        """Send what waits from earlier backwards for parameters that this one did not use."""
        for flat in self.flats:
            if flat.syncs and flat.carry.is_due:
                self._send(self._alone[flat.position])
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
        self._is_careful = False
        self.uses.drop()
        self._coming.end()
        self._late.clear()
        for flight in self._flights:
            if flight is not None and flight.pending is not None:
                flight.pending.wait()  # or it would write into memory of the next
        self.lane.join()
        self._flights = [None] * self.buffers

    def _send(self, load: Load, used_before: Sequence[bool] | None = None) -> None:
        """Send what is held of a load; `used_before` says which parameters of its flat have gradients from before."""
        if not all([flat.syncs for flat in load.flats]):  # the same on all ranks
            for flat in load.flats if len(load.flats) > 1 else ():
                self._send(self._alone[flat.position])
            return
        turn = self._turn
        self._land(turn)
        self._turn = (turn + 1) % self.buffers
        self._sent += 1
        packing = self._packing(load, turn)
        used = load.pack(packing)
        if used_before is not None:
            used = [[a or b for a, b in zip(used[0], used_before, strict=True)]]
        self.uses.pattern += zip(load.numbers, used, strict=True)
        if not self._streams.is_cuda:
            self._flights[turn] = _Flight(load, used, packing, load.reduce(packing))
            return
        self.lane.follow()
        with self.lane:
            load.reduce(packing).wait()
            grads = load.receive(packing, used)
            self.lane.mark(self._events[turn])
        self._flights[turn] = _Flight(load, used, packing, grads=grads)

    def _land(self, turn: int) -> None:
        flight, self._flights[turn] = self._flights[turn], None
        if flight is None:
            return
        load, grads = flight.load, flight.grads
        if flight.pending is not None:
            flight.pending.wait()
            grads = load.receive(flight.packing, flight.used)
        else:
            self._streams.wait(self._events[turn])
            if any([flat.is_offloaded for flat in load.flats]):
                self._events[turn].synchronize()  # hooks and the optimizer read gradients on the CPU
        assert grads is not None
        for flat, grad, used in zip(load.flats, grads, flight.used, strict=True):
            self._give(flat, grad, used)

    def _give(self, flat: Flat, grad: torch.Tensor | None, used: list[bool]) -> None:
        """Let the parameters of a flat have what was summed."""
        if grad is None:
            self._is_carrying = True
            return
        flat.attach(grad, used)
        if self._landed is not None:
            before = self._landed.get(flat.position, grad)
            self._landed[flat.position] = grad if before is grad else before + grad
        if flat.pieces.has_hooks:
            self._run_hooks(flat, used)

    def _run_hooks(self, flat: Flat, used: list[bool]) -> None:
        flat.show_shells()  # the module's backward is done with the others
        flat.run_hooks(used)

    def _packing(self, load: Load, turn: int) -> Packing:
        if turn not in self._memory:
            self._memory[turn] = torch.empty(self._memory_size, dtype=torch.uint8, device=self._streams.device)
        memory = self._memory[turn]
        if not memory.untyped_storage().nbytes():
            memory.untyped_storage().resize_(self._memory_size)
        place = (turn, load.numbers)
        if place not in self._packings:
            self._packings[place] = load.packing_in(memory)
        return self._packings[place]


@attrs.frozen(eq=False)
class _Expected:
    """What a backward brings: loads in order, and the place there of each flat by its number."""

    loads: list[Load]
    places: dict[int, int]

    @classmethod
    def of(cls, flats: Sequence[Flat]) -> _Expected:
        loads = loads_of(flats)
        return cls(loads, {number: place for place, load in enumerate(loads) for number in load.numbers})

    def nodes(self) -> list[Any]:
        """The autograd nodes of the flats, in the order of `places`."""
        return [flat.node for load in self.loads for flat in load.flats]


def _dtypes_of(flats: Sequence[Flat]) -> list[tuple[torch.dtype, torch.dtype]]:
    return [(flat.compute_dtype, flat.reduce_dtype) for flat in flats]
