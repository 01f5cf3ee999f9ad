"""What the members of one group bring to their collectives, and whether it fits together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.mesh import Ranks


@attrs.frozen
class Call:
    """One rank's part in a collective.

    Attributes:
        name: of the collective.
        text: its arguments, for messages.
        alike: what has to be equal on all members.
        brought: what it gives the others.
        combine: from what all brought, in group order, to what each may read; it must not keep their memory.
        check: from all calls to what is wrong with them, or "".
    """

    name: str
    text: str
    alike: tuple[Any, ...]
    brought: Any
    combine: Callable[[Sequence[Any]], Any]
    check: Callable[[Sequence[Call]], str] | None = None

    def __str__(self) -> str:
        return f"{self.name}({self.text})"


class Slot:
    """One collective of a group: the calls of its members, in group order, and once all are there what they made."""

    __slots__ = ("board", "calls", "channel", "fault", "left", "sites")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.calls: list[Call | None] = [None] * len(channel.ranks)
        self.left = len(channel.ranks)
        self.board: Any = None
        self.fault: Callable[[], BaseException] | None = None
        self.sites: dict[int, str] = {}  # of ranks that went on after they had called

    @property
    def is_settled(self) -> bool:
        return self.left == 0 or self.fault is not None

    def has(self, rank: int) -> bool:
        return self.calls[self.channel.ranks.index(rank)] is not None

    def put(self, index: int, call: Call) -> None:
        """Add a member's call."""
        self.calls[index] = call
        self.left -= 1

    def combine(self) -> None:
        """Make what all may read, once all have called. Keeps nothing of the tensors they brought."""
        calls = self.all_calls()
        with torch.no_grad():
            self.board = calls[0].combine([call.brought for call in calls])

    def all_calls(self) -> list[Call]:
        """The calls that are there, in group order."""
        return [call for call in self.calls if call is not None]


class Channel:
    """The collectives of the ranks of one group, in the order in which each of them calls."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._made = [0] * len(ranks)
        self._slots: dict[int, Slot] = {}

    def next_slot(self, index: int) -> Slot:
        """The slot of a member's next collective."""
        number = self._made[index]
        self._made[index] += 1
        slot = self._slots.setdefault(number, Slot(self))
        if min(self._made) > number:
            del self._slots[number]  # all members have it
        return slot

    def open_slots(self) -> list[Slot]:
        """Those that lack the call of a member."""
        return list(self._slots.values())
