"""`Reductions`: the gradients of flats, packed and summed over the ranks in one order, while backward goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.fsdp.flat import Flat, Packing
from shardtensor.fsdp.streams import Streams

_BUFFERS = 2
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

    def __init__(self, flats: Sequence[Flat], streams: Streams) -> None:
        self.flats, self._streams = list(flats), streams
        self.lane = streams.lane()
        self.is_on = True
        self._uses: list[int] = []
        self._order: list[int] = []
        self._expected: list[int] | None = None
        self._next = 0
        self._flights: list[_Flight | None] = [None] * _BUFFERS
        self._events = [streams.event() for _ in range(_BUFFERS)]
        self._memory: dict[int, torch.Tensor] = {}
        self._packings: dict[tuple[int, int], Packing] = {}
        self._memory_size = max(flat.gradient_bytes for flat in flats)
        self._turn = 0
        for flat in flats:
            flat.on_gradients = self.arrived
        self._numbers = {id(flat): i for i, flat in enumerate(self.flats)}

    # -- the order --------------------------------------------------------------------------------------------------

    def used(self, flats: Sequence[Flat]) -> None:
        """Take note that a forward uses these now."""
        for flat in flats:
            number = self._numbers[id(flat)]
            if number not in self._uses:
                self._uses.append(number)

    def agree_on_use(self, group: Group) -> None:
        """Settle the order on all ranks, from what each noted."""
        found = group.exchange_objects(self._uses)
        self._order = list(dict.fromkeys(number for uses in found for number in uses))[::-1]
        self._expected = None

    def begin(self, group: Group) -> None:
        """At the start of a backward: know what will come. The first time, the ranks ask each other."""
        self._next = 0
        if self._expected is None:
            mine = [bool(flat.node is not None and _will_run(flat.node)) for flat in self.flats]
            found = group.exchange_objects(mine)
            self._expected = [i for i in self._order if any(masks[i] for masks in found)]

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, flat: Flat, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of a flat's whole parameters, and send what is next in order and there."""
        flat.hold(grads)
        if not self.is_on:
            return
        expected = self._expected or []
        number = self._numbers[id(flat)]
        if number not in expected[self._next :]:
            self._send(flat)
            return
        while self._next < len(expected) and self.flats[expected[self._next]].held is not None:
            self._send(self.flats[expected[self._next]])
            self._next += 1

    def end(self) -> None:
        """At the end of a backward: send what is left, zeros where nothing came, and wait for all."""
        if self.is_on:
            for number in (self._expected or [])[self._next :]:
                self._send(self.flats[number])
            self._next = len(self._expected or [])
        for _ in self._flights:
            self._land(self._turn)
            self._turn = (self._turn + 1) % _BUFFERS
        self.lane.join()
        if self._memory_size > _KEPT:
            self._memory, self._packings = {}, {}

    def drop(self) -> None:
        """Forget what a broken backward left."""
        for flat in self.flats:
            flat.held = None
        for flight in self._flights:
            if flight is not None and flight.pending is not None:
                flight.pending.wait()  # nothing may write into the buffers any more
        self._flights = [None] * _BUFFERS

    def _send(self, flat: Flat) -> None:
        turn = self._turn
        self._land(turn)
        self._turn = (turn + 1) % _BUFFERS
        packing = self._packing(flat, turn)
        used = flat.pack(packing)
        if not self._streams.is_cuda:
            self._flights[turn] = _Flight(flat, used, packing, flat.reduce(packing))
            return
        self.lane.follow()
        with self.lane:
            flat.reduce(packing).wait()
            grad = flat.receive(packing.own)
            self.lane.mark(self._events[turn])
        self._flights[turn] = _Flight(flat, used, packing, grad=grad)

    def _land(self, turn: int) -> None:
        flight, self._flights[turn] = self._flights[turn], None
        if flight is None:
            return
        flat = flight.flat
        if flight.pending is None:
            self._streams.wait(self._events[turn])
        else:
            flight.pending.wait()
            flight.grad = flat.receive(flight.packing.own)
        assert flight.grad is not None
        flat.attach(flight.grad, flight.used)
        if flat.pieces.has_hooks:
            flat.run_hooks(flight.used)

    def _packing(self, flat: Flat, turn: int) -> Packing:
        place = (turn, self._numbers[id(flat)])
        if place not in self._packings:
            if turn not in self._memory:
                device = self._streams.device
                self._memory[turn] = torch.empty(self._memory_size, dtype=torch.uint8, device=device)
            self._packings[place] = flat.packing_in(self._memory[turn])
        return self._packings[place]


def _will_run(node: Any) -> bool:
    return torch._C._will_engine_execute_node(node)
