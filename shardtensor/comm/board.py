"""What each rank last said about itself, at the store through which torch's process groups found each other."""

from __future__ import annotations

import atexit
import json
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

CAME = 1 << 47
"""One rank in the counter of a meeting; below it is the sum of at most 2**15 digests of 32 bits."""


@attrs.frozen
class Whereabouts:
    """What a rank last said: the meeting it came to, or that it has ended.

    Attributes:
        key: of the meeting; "" for a rank that has ended.
        place: which collective of which ranks that is, for messages.
        call: what was called, and where.
        ranks: the global ranks that meet there.
        threads: how many threads of the rank have come to meetings.
    """

    key: str
    place: str = ""
    call: str = ""
    ranks: tuple[int, ...] = ()
    threads: int = 1


class Board:
    """The store, and what each rank last wrote there about itself."""

    def __init__(self, store: Any, rank: int) -> None:
        # A connection of its own, where there is one: a call of torch's that waits on the store does not block it.
        store = store.clone() if hasattr(store, "clone") else store
        self.store = dist.PrefixStore("shardtensor", store)
        self.rank = rank
        self._threads: set[int] = set()
        mine = weakref.ref(self)
        self._at_exit: Callable[[], None] = lambda: _say_ended(mine)
        atexit.register(self._at_exit)
        weakref.finalize(self, atexit.unregister, self._at_exit)

    def say(self, here: Whereabouts) -> None:
        """Write what this rank does; others read it when they miss the rank."""
        self.store.set(f"at/{self.rank}", json.dumps(attrs.astuple(here)))

    def threads(self) -> int:
        """How many threads of this rank came here so far; autograd's count as the one that waits for them."""
        if torch._C._current_autograd_node() is None:
            self._threads.add(get_ident())
        return len(self._threads)

    def read(self, rank: int) -> Whereabouts | None:
        """What a rank last said; None when it never did."""
        if not self.store.check([f"at/{rank}"]):
            return None
        key, place, call, ranks, threads = json.loads(self.store.get(f"at/{rank}"))
        return Whereabouts(key, place, call, tuple(ranks), threads)

    def is_open(self, at: Whereabouts) -> bool:
        """Whether ranks wait in a meeting: it was not completed, and no fault was found in it."""
        if not at.key or self.store.check([f"{at.key}/why"]) or not self.store.check([at.key]):
            return False
        return self.store.add(at.key, 0) // CAME < len(at.ranks)


def _say_ended(board: weakref.ref[Board]) -> None:
    found = board()
    if found is not None:
        try:
            found.say(Whereabouts(""))
        except RuntimeError:  # the store has ended before this rank
            return


_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()


def board_of_world() -> Board:
    """The board of the default process group."""
    world = dist.group.WORLD
    if world not in _boards:
        _boards[world] = Board(distributed_c10d._get_default_store(), dist.get_rank())
    return _boards[world]
