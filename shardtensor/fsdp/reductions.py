"""`Reductions`: the gradients of flats, packed and summed over the ranks in one order, while backward goes on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Group, Pending
from shardtensor.fsdp.flat import Flat, Packing
from shardtensor.fsdp.streams import Streams

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

    def __init__(self, flats: Sequence[Flat], streams: Streams) -> None:
        self.flats, self._streams = list(flats), streams
        self.lane = streams.lane()
        self._uses: list[int] = []
        self._order: list[int] = []
        self._expected: list[int] = []
        self._expectations: dict[Hashable, list[int]] = {}  # by kind of backward
        self._suit: Hashable = None
        self._known: dict[Hashable, tuple[list[int], list[int], dict[Hashable, list[int]]]] = {}
        self._next = 0
        self._is_carrying = False  # whether some gradients may wait for a later backward
        self._memory_size = max(flat.gradient_bytes for flat in flats)
        self.resize(BUFFERS)
        for flat in flats:
            flat.on_gradients = self.arrived
        self._numbers = {id(flat): i for i, flat in enumerate(self.flats)}

    def resize(self, buffers: int) -> None:
        """Have as many reductions on their way at a time; between two backwards."""
        self._buffers = buffers
        self._flights: list[_Flight | None] = [None] * buffers
        self._events = [self._streams.event() for _ in range(buffers)]
        self._memory: dict[int, torch.Tensor] = {}
        self._packings: dict[tuple[int, int], Packing] = {}
        self._turn = 0

    def suit(self, trains: Hashable) -> None:
        """Go by what was learned when these parameters were trained."""
        self._known[self._suit] = (self._uses, self._order, self._expectations)
        self._suit = trains
        self._uses, self._order, self._expectations = self._known.get(trains, ([], [], {}))

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
        self._expectations.clear()

    def begin(self, group: Group, kind: Hashable) -> None:
        """At the start of a backward: know what will come. The first time, the ranks ask each other.

        Args:
            group: all ranks.
            kind: backwards of one kind are taken to bring the same gradients.
        """
        self._next = 0
        known = self._expectations.get(kind)
        if known is None:
            mine = [bool(flat.node is not None and _will_run(flat.node)) for flat in self.flats]
            found = group.exchange_objects(mine)
            known = self._expectations[kind] = [i for i in self._order if any(masks[i] for masks in found)]
        self._expected = known

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, flat: Flat, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of a flat's whole parameters, and send what is next in order and there."""
        flat.hold(grads)
        if not flat.syncs:
            self._is_carrying = True
            return
        expected = self._expected
        number = self._numbers[id(flat)]
        if number not in expected[self._next :]:
            self._send(flat)
            return
        while self._next < len(expected):
            first = self.flats[expected[self._next]]
            if first.held is not None:
                self._send(first)
            elif first.syncs:
                break
            self._next += 1

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
        if self._memory_size > _KEPT:
            self._memory, self._packings = {}, {}

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
            self._turn = (self._turn + 1) % self._buffers

    def drop(self) -> None:
        """Forget what a broken backward left; what earlier ones left to wait stays."""
        for flat in self.flats:
            flat.held = None
        for flight in self._flights:
            if flight is not None and flight.pending is not None:
                flight.pending.wait()  # or it would write into memory of the next
        self._flights = [None] * self._buffers

    def _send(self, flat: Flat) -> None:
        turn = self._turn
        self._land(turn)
        self._turn = (turn + 1) % self._buffers
        packing = self._packing(flat, turn)
        used = flat.pack(packing)
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
        for shell in flat.shells:
            hooks: Any = shell._local._post_accumulate_grad_hooks
            if hooks:
                self._run_hooks(flat, flight.used)
                return

    def _run_hooks(self, flat: Flat, used: list[bool]) -> None:
        flat.show_shells()  # the module's backward is done with the others
        for shell, is_used in zip(flat.shells, used, strict=True):
            if is_used:
                for hook in list((shell._local._post_accumulate_grad_hooks or {}).values()):
                    hook(shell._local)

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
