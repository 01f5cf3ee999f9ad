"""What each rank is doing, in the store through which torch's process groups found each other."""

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

ARRIVAL = 1 << 47
"""What a rank adds to the counter of a rendezvous; the lower bits hold the sum of at most 2**15 digests of 32 bits."""


@attrs.frozen
class RankStatus:
    """The rendezvous that a rank entered last, or that the rank has ended.

    Attributes:
        key: the rendezvous's key in the store; "" for a rank that has ended.
        place: which collective of which ranks it is, for messages.
        call: the call, and the line that made it.
        ranks: the global ranks of the rendezvous.
        threads: how many threads of the rank have entered one.
    """

    key: str
    place: str = ""
    call: str = ""
    ranks: tuple[int, ...] = ()
    threads: int = 1


class StatusStore:
    """The status of each rank, in a torch store."""

    def __init__(self, store: Any, rank: int) -> None:
        # A connection of its own, if the store has several: a call of torch that waits on the store does not block it.
        store = store.clone() if hasattr(store, "clone") else store
        self.store = dist.PrefixStore("shardtensor", store)
        self.rank = rank
        self._threads: set[int] = set()
        this = weakref.ref(self)
        self._at_exit: Callable[[], None] = lambda: _write_ended(this)
        atexit.register(self._at_exit)
        weakref.finalize(self, atexit.unregister, self._at_exit)

    def write(self, status: RankStatus) -> None:
        """Write this rank's status."""
        self.store.set(f"at/{self.rank}", json.dumps(attrs.astuple(status)))

    def read(self, rank: int) -> RankStatus | None:
        """Return the status of a rank; None if it has never written one."""
        if not self.store.check([f"at/{rank}"]):
            return None
        key, place, call, ranks, threads = json.loads(self.store.get(f"at/{rank}"))
        return RankStatus(key, place, call, tuple(ranks), threads)

    def count_threads(self) -> int:
        """Return how many threads of this rank have called this; a thread of autograd is not counted."""
        if torch._C._current_autograd_node() is None:
            self._threads.add(get_ident())
        return len(self._threads)

    def is_open(self, status: RankStatus) -> bool:
        """Whether ranks wait in this rendezvous: some have not arrived, and no error was raised."""
        if not status.key or self.store.check([f"{status.key}/why"]) or not self.store.check([status.key]):
            return False
        return self.store.add(status.key, 0) // ARRIVAL < len(status.ranks)


def _write_ended(statuses: weakref.ref[StatusStore]) -> None:
    found = statuses()
    if found is not None:
        try:
            found.write(RankStatus(""))
        except RuntimeError:  # the store has ended before this rank
            return


_stores: weakref.WeakKeyDictionary[Any, StatusStore] = weakref.WeakKeyDictionary()


def world_status_store() -> StatusStore:
    """Return the status store of the default process group."""
    world = dist.group.WORLD
    if world not in _stores:
        _stores[world] = StatusStore(distributed_c10d._get_default_store(), dist.get_rank())
    return _stores[world]
