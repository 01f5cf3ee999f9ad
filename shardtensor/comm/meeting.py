"""Ranks meet at a store before each collective, so that a missing or another call is told and not waited for.

The store is the one through which torch's process groups found each other; it needs no collective. A rank says what it
calls and where, adds itself to the counter of this meeting, and looks at the counter until all are there. The counter
holds the number of ranks that came and the sum of the digests of their calls: whoever reads it sees at once whether all
that came make the same call. What one rank finds wrong is written down under the meeting, and every rank raises that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from zlib import crc32

import torch.distributed as dist

from shardtensor import errors
from shardtensor.comm.agree import name_ranks, ranks_by_value
from shardtensor.comm.board import CAME, Board, Whereabouts, board_of_world
from shardtensor.comm.group import Group
from shardtensor.comm.primitives import timeout_of
from shardtensor.comm.wire import Wire
from shardtensor.errors import AbsentRankError, CallMismatchError, ShardTensorError
from shardtensor.mesh import Ranks

_LATE_S = 1.0  # how long a mismatch waits for the rest of the ranks, to say where they are
_LOOK_ROUND_S = 0.2  # after this long, and then as often, a waiting rank looks what the absent ones do
_ORDER = "make the same calls in the same order on every rank of the group, each from one line of the program"


class Meeting:
    """Where the ranks of one group meet before each of their collectives.

    Args:
        name: the same on all ranks, and of no other group that exists at the same time.
        ranks: the global ranks that meet.
        timeout_s: the timeout of the group; a rank that waits raises before it is over.
    """

    def __init__(self, board: Board, name: str, ranks: Ranks, timeout_s: float) -> None:
        self.board, self.ranks, self.timeout_s = board, ranks, timeout_s
        name = f"group/{sha256(repr((name, tuple(ranks))).encode()).hexdigest()[:16]}"
        # The store may have known a group of this name before.
        made = board.store.add(f"{name}/made/{board.rank}", 1)
        self.name = f"{name}/{made}"
        self._met = 0
        self._keys: list[str] = []  # of the last meeting, in the store

    def meet(self, operation: str, call: str, pairs: int | None = None, own: str = "") -> None:
        """Return when all ranks are here with the same `call`.

        Args:
            operation: its short name, for the first line of messages.
            call: what must be equal on every rank.
            pairs: what adds up to zero over the ranks when each receives as many elements as it is sent.
            own: the call as this rank makes it, for messages, where that is not the same on every rank.

        Raises:
            CallMismatchError: on every rank, with one text: some make another call.
            AbsentRankError: on every rank that is here or comes later, with one text: some did not come in time.
        """
        self._met += 1
        key, store = f"{self.name}/{self._met}", self.board.store
        place = f"collective {self._met} of {name_ranks(self.ranks)}"
        here = Whereabouts(key, place, own or call, tuple(self.ranks), self.board.threads())
        digest = crc32(call.encode())
        before, self._keys = self._keys, [key] if pairs is None else [key, f"{key}/pairs"]
        try:
            self.board.say(here)
            if pairs is not None:
                store.add(f"{key}/pairs", pairs)
            came = store.add(key, CAME + digest)
            if came == len(self.ranks) * (CAME + digest):
                for old in before:  # all have left it
                    store.delete_key(old)
            else:
                self._await(here, operation, digest, came)
            if pairs is not None and store.add(f"{key}/pairs", 0):
                raise self._settle(key, self._mismatch(here, "the numbers of elements sent and received differ"))
        except dist.DistNetworkError as error:
            raise AbsentRankError(
                f"{operation}: the store of the process groups cannot be reached; nothing was moved",
                {"call": call, "in": place},
                "look for the error of the rank that keeps it, most often rank 0: it has ended before the others",
            ) from error

    def is_awaited(self) -> bool:
        """Whether other ranks wait in the next meeting already. Costs a question to the store."""
        return bool(self.board.store.check([f"{self.name}/{self._met + 1}"]))

    def _await(self, here: Whereabouts, operation: str, digest: int, came: int) -> None:
        """Look at the counter until all are here."""
        start = time.monotonic()
        # Sooner than the timeout, so that whoever else counts it down does not come first.
        patience = self.timeout_s - min(1.0, self.timeout_s / 4)
        looked = 0.0
        while came != len(self.ranks) * (CAME + digest):
            waited = time.monotonic() - start
            count, total = divmod(came, CAME)
            if total != count * digest:
                if count < len(self.ranks) and waited < min(_LATE_S, patience):
                    time.sleep(0.01)  # the others may say more
                else:
                    raise self._settle(here.key, self._mismatch(here, "the ranks are in different calls"))
            elif waited > patience:
                self._leave(here, digest, self._absence(here, operation, f"within {self.timeout_s:g} s"))
            elif waited - looked > _LOOK_ROUND_S:
                looked = waited
                self._look_round(here, operation, digest)
            else:
                time.sleep(min(waited / 4, 0.002))
            if waited > 0.001 and self.board.store.check([f"{here.key}/why"]):
                raise self._settle(here.key, None)
            came = self.board.store.add(here.key, 0)

    def _look_round(self, here: Whereabouts, operation: str, digest: int) -> None:
        """Give up at once where waiting is of no use."""
        absent = self._absent(here)
        if any(at is not None and not at.key for at in absent.values()):
            self._leave(here, digest, self._absence(here, operation, "and some of them have ended"))
        circle = self._circle(here)
        if circle and circle == self._circle(here):
            facts = {f"rank {rank}": f"{at.call}\n{at.place}" for rank, at in sorted(circle.items())}
            fault = f"{name_ranks(circle)} wait for each other in different groups; nothing was moved"
            error = CallMismatchError(fault, facts, _ORDER)
            for at in circle.values():  # else the others would see this rank leave, and wait for it
                if at.key != here.key:
                    self._settle(at.key, error)
            self._leave(here, digest, error)

    def _circle(self, here: Whereabouts) -> dict[int, Whereabouts]:
        """Ranks that wait for each other, from this one on; none when the chain ends at one that works.

        A rank in a meeting that is open goes nowhere, if it has one thread, and what it said last is where it is.
        """
        path = {self.board.rank: here}
        while True:
            at = path[next(reversed(path))]
            if at.threads > 1 or not self.board.is_open(at):
                return {}
            found = {rank: self.board.read(rank) for rank in at.ranks}
            absent = {rank: other for rank, other in found.items() if other is None or other.key != at.key}
            for rank, other in absent.items():
                if other is None or not other.key:
                    return {}
                if rank in path:
                    return path if rank == self.board.rank else {}
                path[rank] = other
                break
            else:
                return {}

    def _leave(self, here: Whereabouts, digest: int, error: ShardTensorError) -> None:
        """Take this rank out of the meeting and raise; stay when the last rank has come meanwhile."""
        if self.board.store.add(here.key, -(CAME + digest)) == (len(self.ranks) - 1) * (CAME + digest):
            self.board.store.add(here.key, CAME + digest)
        else:
            raise self._settle(here.key, error)

    def _settle(self, key: str, error: ShardTensorError | None) -> ShardTensorError:
        """The one error of a meeting: what the first rank wrote down, so that all raise the same."""
        mine = "" if error is None else json.dumps([type(error).__name__, str(error)])
        if key in self._keys:
            self._keys.append(f"{key}/why")
        name, text = json.loads(self.board.store.compare_set(f"{key}/why", "", mine))
        return getattr(errors, name)(text)

    def _absent(self, here: Whereabouts) -> dict[int, Whereabouts | None]:
        found = {rank: self.board.read(rank) for rank in self.ranks}
        return {rank: at for rank, at in found.items() if at is None or at.key != here.key}

    def _mismatch(self, here: Whereabouts, what: str) -> ShardTensorError:
        found = {rank: self.board.read(rank) for rank in self.ranks}
        calls = {rank: at.call for rank, at in found.items() if at is not None and at.key == here.key}
        facts = {name_ranks(ranks): call for call, ranks in ranks_by_value(calls).items()}
        facts |= self._say_absent({rank: at for rank, at in found.items() if rank not in calls})
        return CallMismatchError(f"{what}; nothing was moved", {**facts, "in": here.place}, _ORDER)

    def _absence(self, here: Whereabouts, operation: str, when: str) -> ShardTensorError:
        absent = self._absent(here)
        fault = f"{operation}: {name_ranks(absent)} did not come {when}; nothing was moved"
        facts = {"call": here.call, "by": name_ranks(rank for rank in self.ranks if rank not in absent)}
        facts |= {**self._say_absent(absent), "in": here.place}
        return AbsentRankError(fault, facts, f"call it on all of {name_ranks(self.ranks)}, or on none")

    def _say_absent(self, absent: Mapping[int, Whereabouts | None]) -> dict[str, str]:
        texts = {rank: self._say_where(at) for rank, at in absent.items()}
        return {name_ranks(ranks): text for text, ranks in ranks_by_value(texts).items()}

    def _say_where(self, at: Whereabouts | None) -> str:
        if at is None:
            return "in no collective yet"
        if not at.key:
            return "ended"
        if self.board.is_open(at):
            return f"waiting in {at.call}\n{at.place}"
        return f"nothing since {at.call}\n{at.place}"


def meeting_of(group: Group, purpose: str) -> Meeting | None:
    """Return a meeting of a group's ranks for a purpose of its own; None for one rank, or ranks that are pretended."""
    wire: Wire | None = getattr(getattr(group, "_group", group), "wire", None)  # of a group with checks, or without
    if wire is None or not set(wire.backends.values()) <= {"gloo", "nccl"}:
        return None
    process_group = group.process_group
    name = f"{purpose} of process group {process_group.group_name}"
    return Meeting(board_of_world(), name, group.ranks, timeout_of(process_group))


def pair_sum(ranks: Sequence[int], rank: int, sent: Sequence[int], received: Sequence[int]) -> int:
    """A number for what a rank sends to and receives from each; over all ranks they add up to zero when all agree.

    Example:
        >>> ranks = (0, 1)
        >>> pair_sum(ranks, 0, (1, 2), (1, 3)) + pair_sum(ranks, 1, (3, 4), (2, 4))
        0
        >>> pair_sum(ranks, 0, (1, 2), (1, 3)) + pair_sum(ranks, 1, (3, 4), (1, 4)) == 0
        False
    """
    out = sum(crc32(b"%d %d %d" % (rank, peer, count)) for peer, count in zip(ranks, sent, strict=True))
    return out - sum(crc32(b"%d %d %d" % (peer, rank, count)) for peer, count in zip(ranks, received, strict=True))
