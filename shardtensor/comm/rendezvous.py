"""Ranks wait for each other in a store before each collective, so that a rank that is missing or calls another
collective raises an error instead of a hang.

The store is the one that torch's process groups were initialized with. A rank writes its status (what it calls,
and where), adds itself to the counter of this rendezvous, and polls it until all ranks have arrived. It holds their
number and the sum of the digests of their calls; one read shows whether all make the same call. The first rank
that finds a fault stores the error, and every rank raises it.
"""

from __future__ import annotations

import atexit
import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any
from zlib import crc32

import attrs
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardtensor import errors
from shardtensor.comm.agree import name_ranks, ranks_by_value
from shardtensor.comm.backend_support import BackendSupport
from shardtensor.comm.group import Group
from shardtensor.comm.primitives import timeout_of
from shardtensor.errors import AbsentRankError, CallMismatchError, ShardTensorError
from shardtensor.mesh import Ranks

_MISMATCH_WAIT_S = 1.0  # after a mismatch, how long to wait for the other ranks, so that the error shows their calls
_CHECK_ABSENT_S = 0.2  # how often a waiting rank reads the status of the absent ones
_ORDER = "make the same calls in the same order on every rank of the group, each from one line of the program"

ARRIVAL = 1 << 47
"""What a rank adds to the counter of a rendezvous; the lower bits hold the sum of at most 2**15 digests of 32 bits."""


@attrs.frozen
class RankStatus:
    """The rendezvous that a rank entered last; its key in the store is "" for a rank that has ended.

    `place` is a text with the collective and its ranks, `call` one with the call and its line. `ranks` are the global
    ranks of the rendezvous.
    """

    key: str
    place: str = ""
    call: str = ""
    ranks: tuple[int, ...] = ()


class StatusStore:
    """The status of each rank, in a torch store."""

    def __init__(self, store: Any, rank: int) -> None:
        # A connection of its own, if the store has several: a call of torch that waits on the store does not block it.
        store = store.clone() if hasattr(store, "clone") else store
        self.store = dist.PrefixStore("shardtensor", store)
        self.rank = rank
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
        key, place, call, ranks = json.loads(self.store.get(f"at/{rank}"))
        return RankStatus(key, place, call, tuple(ranks))

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


class Rendezvous:
    """Where the ranks of one group wait for each other before each of their collectives.

    The name is the same on all ranks, and different from that of any other group that exists at the same time. A rank
    that waits raises before the timeout of the group is over.
    """

    def __init__(self, statuses: StatusStore, name: str, ranks: Ranks, timeout_s: float) -> None:
        self.statuses, self.ranks, self.timeout_s = statuses, ranks, timeout_s
        name = f"group/{sha256(repr((name, tuple(ranks))).encode()).hexdigest()[:16]}"
        # An earlier group may have had the same name.
        made = statuses.store.add(f"{name}/made/{statuses.rank}", 1)
        self.name = f"{name}/{made}"
        self._count = 0
        self._keys: list[str] = []  # of the last collective, in the store

    def wait(self, operation: str, call: str, pairs: int | None = None, own: str = "") -> None:
        """Return when all ranks have arrived with the same `call`; `operation` is its short name.

        The sum of `pairs` over the ranks is zero when each receives as many elements as are sent to it; `own` is
        the call of this rank, for messages, if it is not the same on every rank.

        Raises:
            CallMismatchError: on every rank, with one text: some ranks make another call.
            AbsentRankError: on every rank that arrives, in time or late, with one text: some did not arrive in time.
        """
        self._count += 1
        key, store = f"{self.name}/{self._count}", self.statuses.store
        place = f"collective {self._count} of {name_ranks(self.ranks)}"
        here = RankStatus(key, place, own or call, tuple(self.ranks))
        digest = crc32(call.encode())
        before, self._keys = self._keys, [key] if pairs is None else [key, f"{key}/pairs"]
        try:
            self.statuses.write(here)
            if pairs is not None:
                store.add(f"{key}/pairs", pairs)
            arrived = store.add(key, ARRIVAL + digest)
            if arrived == len(self.ranks) * (ARRIVAL + digest):
                for old in before:  # no rank reads these any more
                    store.delete_key(old)
            else:
                self._poll(here, operation, digest, arrived)
            if pairs is not None and store.add(f"{key}/pairs", 0):
                raise self._shared_error(key, self._mismatch(here, "the numbers of elements sent and received differ"))
        except dist.DistNetworkError as error:
            raise AbsentRankError(
                f"{operation}: the store of the process groups cannot be reached; nothing was moved",
                {"call": call, "in": place},
                "look for the error of the rank that keeps it, most often rank 0: it has ended before the others",
            ) from error

    def is_awaited(self) -> bool:
        """Whether other ranks already wait for this one. Costs a request to the store."""
        return bool(self.statuses.store.check([f"{self.name}/{self._count + 1}"]))

    def _poll(self, here: RankStatus, operation: str, digest: int, arrived: int) -> None:
        """Read the counter until all ranks have arrived."""
        start = time.monotonic()
        # Before the timeout, so that this error is raised before the backend's.
        limit_s = self.timeout_s - min(1.0, self.timeout_s / 4)
        checked = 0.0
        while arrived != len(self.ranks) * (ARRIVAL + digest):
            waited = time.monotonic() - start
            count, total = divmod(arrived, ARRIVAL)
            if total != count * digest:
                if count < len(self.ranks) and waited < min(_MISMATCH_WAIT_S, limit_s):
                    time.sleep(0.01)
                else:
                    raise self._shared_error(here.key, self._mismatch(here, "the ranks are in different calls"))
            elif waited > limit_s:
                self._withdraw(here, digest, self._absence(here, operation, f"within {self.timeout_s:g} s"))
            elif waited - checked > _CHECK_ABSENT_S:
                checked = waited
                if any(at is not None and not at.key for at in self._absent(here).values()):
                    self._withdraw(here, digest, self._absence(here, operation, "and some of them have ended"))
            else:
                time.sleep(min(waited / 4, 0.002))
            if waited > 0.001 and self.statuses.store.check([f"{here.key}/why"]):
                raise self._shared_error(here.key, None)
            arrived = self.statuses.store.add(here.key, 0)

    def _withdraw(self, here: RankStatus, digest: int, error: ShardTensorError) -> None:
        """Remove this rank from the counter and raise; return if the last rank has arrived in the meantime."""
        store = self.statuses.store
        if store.add(here.key, -(ARRIVAL + digest)) == (len(self.ranks) - 1) * (ARRIVAL + digest):
            store.add(here.key, ARRIVAL + digest)
        else:
            raise self._shared_error(here.key, error)

    def _shared_error(self, key: str, error: ShardTensorError | None) -> ShardTensorError:
        """Store the error unless another rank has stored one; return the stored one, the same on all ranks."""
        own = "" if error is None else json.dumps([type(error).__name__, str(error)])
        if key in self._keys:
            self._keys.append(f"{key}/why")
        name, text = json.loads(self.statuses.store.compare_set(f"{key}/why", "", own))
        return getattr(errors, name)(text)

    def _absent(self, here: RankStatus) -> dict[int, RankStatus | None]:
        found = {rank: self.statuses.read(rank) for rank in self.ranks}
        return {rank: at for rank, at in found.items() if at is None or at.key != here.key}

    def _mismatch(self, here: RankStatus, what: str) -> ShardTensorError:
        found = {rank: self.statuses.read(rank) for rank in self.ranks}
        calls = {rank: at.call for rank, at in found.items() if at is not None and at.key == here.key}
        facts = {name_ranks(ranks): call for call, ranks in ranks_by_value(calls).items()}
        facts |= self._describe_absent({rank: at for rank, at in found.items() if rank not in calls})
        return CallMismatchError(f"{what}; nothing was moved", {**facts, "in": here.place}, _ORDER)

    def _absence(self, here: RankStatus, operation: str, when: str) -> ShardTensorError:
        absent = self._absent(here)
        fault = f"{operation}: {name_ranks(absent)} did not join {when}; nothing was moved"
        facts = {"call": here.call, "by": name_ranks(rank for rank in self.ranks if rank not in absent)}
        facts |= {**self._describe_absent(absent), "in": here.place}
        return AbsentRankError(fault, facts, f"call it on all of {name_ranks(self.ranks)}, or on none")

    def _describe_absent(self, absent: Mapping[int, RankStatus | None]) -> dict[str, str]:
        texts = {rank: self._describe(at) for rank, at in absent.items()}
        return {name_ranks(ranks): text for text, ranks in ranks_by_value(texts).items()}

    def _describe(self, status: RankStatus | None) -> str:
        if status is None:
            return "in no collective yet"
        if not status.key:
            return "ended"
        if self.statuses.is_open(status):
            return f"waiting in {status.call}\n{status.place}"
        return f"nothing since {status.call}\n{status.place}"


def rendezvous_of(group: Group, purpose: str) -> Rendezvous | None:
    """Return a rendezvous of a group's ranks for one purpose; None for one rank, or simulated ones."""
    # A group with checks wraps another one.
    support: BackendSupport | None = getattr(getattr(group, "_group", group), "support", None)
    if support is None or not set(support.backends.values()) <= {"gloo", "nccl"}:
        return None
    process_group = group.process_group
    name = f"{purpose} of process group {process_group.group_name}"
    return Rendezvous(world_status_store(), name, group.ranks, timeout_of(process_group))


def pair_sum(ranks: Sequence[int], rank: int, sent: Sequence[int], received: Sequence[int]) -> int:
    """Return a number for the counts that a rank sends and receives; over all ranks these sum to zero if they match."""
    out = sum(crc32(b"%d %d %d" % (rank, peer, count)) for peer, count in zip(ranks, sent, strict=True))
    return out - sum(crc32(b"%d %d %d" % (peer, rank, count)) for peer, count in zip(ranks, received, strict=True))
