"""The collectives of one simulated group: the calls of its members, and their common result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.mesh import Ranks


@attrs.frozen
class Call:
    """One rank's call of a collective.

    Attributes:
        name: of the collective.
        text: its arguments, for messages.
        signature: must be equal on all members.
        data: what this rank sends.
        combine: makes the common result from the data of all, in group order; it must not keep their memory.
        check: returns what is wrong with the calls of all members, or "".
    """

    name: str
    text: str
    signature: tuple[Any, ...]
    data: Any
    combine: Callable[[Sequence[Any]], Any]
    check: Callable[[Sequence[Call]], str] | None = None

    def __str__(self) -> str:
        return f"{self.name}({self.text})"


class Slot:
    """One collective of a group: the calls of its members, in group order, and the result once all have called."""

    __slots__ = ("calls", "channel", "fault", "left", "result")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.calls: list[Call | None] = [None] * len(channel.ranks)
        self.left = len(channel.ranks)
        self.result: Any = None
        self.fault: Callable[[], BaseException] | None = None

    @property
    def is_complete(self) -> bool:
        return self.left == 0 or self.fault is not None

    def has(self, rank: int) -> bool:
        return self.calls[self.channel.ranks.index(rank)] is not None

    def add(self, index: int, call: Call) -> None:
        """Add a member's call."""
        self.calls[index] = call
        self.left -= 1

    def combine(self) -> None:
        """Compute the result, once all have called. It keeps none of their tensors."""
        calls = self.all_calls()
        with torch.no_grad():
            self.result = calls[0].combine([call.data for call in calls])

    def all_calls(self) -> list[Call]:
        """Return the calls made so far, in group order."""
        return [call for call in self.calls if call is not None]


class Channel:
    """The collectives of one group, each matched by its number in the order of each rank's calls."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._made = [0] * len(ranks)
        self._slots: dict[int, Slot] = {}

    def next_slot(self, index: int) -> Slot:
        """Return the slot of a member's next collective."""
        number = self._made[index]
        self._made[index] += 1
        slot = self._slots.setdefault(number, Slot(self))
        if min(self._made) > number:
            del self._slots[number]  # all members have called
        return slot

    def open_slots(self) -> list[Slot]:
        """Return the slots that lack the call of a member."""
        return list(self._slots.values())
