"""Meetings of ranks that are threads of this process around one store: one verdict for all, and never in vain."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from threading import Thread
from typing import Any
from zlib import crc32

import pytest
import torch.distributed as dist

from shardtensor.comm.rendezvous import ARRIVAL, RankStatus, Rendezvous, StatusStore, pair_sum
from shardtensor.errors import AbsentRankError, CallMismatchError

SHORT_S = 0.4


class Ranks:
    """Boards of some ranks at one store."""

    def __init__(self, count: int) -> None:
        self.store = dist.HashStore()
        self.statuses = [StatusStore(self.store, rank) for rank in range(count)]

    def rendezvous(self, rank: int, ranks: tuple[int, ...], timeout_s: float = 10.0) -> Rendezvous:
        return Rendezvous(self.statuses[rank], f"of {ranks}", ranks, timeout_s)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """What a body returns on each rank, or the error that it raises."""
        results: list[Any] = [None] * len(self.statuses)

        def call(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except Exception as error:
                results[rank] = error

        threads = [Thread(target=call, args=(rank,)) for rank in range(len(self.statuses))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a rank waits in vain"
        return results


def the_one(results: list[Any], kind: type[Exception]) -> str:
    """The text of the error that all ranks raise."""
    assert {type(each) for each in results} == {kind}, results
    (text,) = {str(each) for each in results}
    return text


def test_equal_calls_pass_and_leave_nothing_behind():
    ranks = Ranks(3)
    keys = []

    def body(rank: int) -> None:
        rendezvous = ranks.rendezvous(rank, (0, 1, 2))
        for k in range(40):
            rendezvous.wait("f", f"f {k}", None if k % 3 else pair_sum((0, 1, 2), rank, [1, 1, 1], [1, 1, 1]))
            if rank == 0:
                keys.append(ranks.store.num_keys())

    assert ranks.run(body) == [None] * 3
    assert max(keys) <= 3 + 3 + 3 * 2, (
        "each rank's two keys, and those of the rendezvous before, of this one, and of the next"
    )


def wait_with(ranks: Ranks, members: tuple[int, ...], calls: tuple[str, ...], rank: int) -> None:
    ranks.rendezvous(rank, members).wait("f", calls[rank])


@pytest.mark.parametrize("count", [2, 3])
def test_whoever_makes_another_call_is_named_on_all_ranks(count):
    for calls in product("ab", repeat=count):
        ranks = Ranks(count)
        results = ranks.run(partial(wait_with, ranks, tuple(range(count)), calls))
        if len(set(calls)) == 1:
            assert results == [None] * count
            continue
        text = the_one(results, CallMismatchError)
        assert text.startswith("the ranks are in different calls; nothing was moved\n")
        assert f"  in       collective 1 of ranks 0-{count - 1}\n".split() in [
            line.split() for line in text.splitlines(True)
        ]
        for call in "ab":
            mine = [rank for rank in range(count) if calls[rank] == call]
            runs = f"{mine[0]}-{mine[1]}" if len(mine) == 2 and mine[1] == mine[0] + 1 else ", ".join(map(str, mine))
            assert f"rank{'s' * (len(mine) > 1)} {runs} {call}" in " ".join(text.split())


def test_after_a_mismatch_the_ranks_meet_again():
    ranks = Ranks(2)

    def body(rank: int) -> str:
        rendezvous = ranks.rendezvous(rank, (0, 1))
        with pytest.raises(CallMismatchError):
            rendezvous.wait("f", f"f {rank}")
        rendezvous.wait("f", "f")
        with pytest.raises(CallMismatchError) as caught:
            rendezvous.wait("f", f"g {rank}", own="my own words")
        return str(caught.value)

    first, second = ranks.run(body)
    assert first == second and "my own words" in first and "collective 3 of" in first


def test_numbers_that_do_not_add_up():
    sent = [(1, 3), (2, 3)]
    for first, second in product((2, 4), (3, 2)):  # what each receives of the other
        received = [(1, first), (second, 3)]

        def body(rank: int, ranks: Ranks, received: list[tuple[int, int]]) -> None:
            pairs = pair_sum((0, 1), rank, sent[rank], received[rank])
            ranks.rendezvous(rank, (0, 1)).wait("f", "f", pairs, f"as rank {rank}")

        results = Ranks(2).run(partial(body, ranks=Ranks(2), received=received))
        if (first, second) == (2, 3):
            assert results == [None, None]
        else:
            text = the_one(results, CallMismatchError)
            assert text.startswith("the numbers of elements sent and received differ; nothing was moved\n")
            assert "as rank 0" in text and "as rank 1" in text


def test_who_does_not_come_is_named_to_all_that_do():
    ranks = Ranks(3)

    def body(rank: int) -> Any:
        rendezvous = ranks.rendezvous(rank, (0, 1, 2), SHORT_S)
        rendezvous.wait("f", "first")
        start = time.monotonic()
        if rank == 2:
            time.sleep(1.1 * SHORT_S)
        try:
            rendezvous.wait("f", "second", own=f"second of rank {rank}")
        except AbsentRankError as error:
            waited = time.monotonic() - start
            assert rank == 2 or SHORT_S / 2 < waited < SHORT_S
            rendezvous.wait("f", "third")
            return str(error)

    first, second, third = ranks.run(body)
    assert first == second == third
    assert first.startswith(f"f: rank 2 did not join within {SHORT_S:g} s; nothing was moved\n")
    lines = [" ".join(line.split()) for line in first.splitlines()]
    assert "by ranks 0-1" in lines
    assert "rank 2 nothing since first" in lines
    assert "in collective 2 of ranks 0-2" in lines
    assert "fix call it on all of ranks 0-2, or on none" in lines


def test_a_mismatch_of_some_is_told_though_another_never_comes():
    ranks = Ranks(3)

    def body(rank: int) -> Any:
        if rank < 2:
            ranks.rendezvous(rank, (0, 1, 2), SHORT_S).wait("f", f"f {rank}")

    *two, _ = ranks.run(body)
    text = the_one(two, CallMismatchError)
    assert "rank 2 in no collective yet" in " ".join(text.split())


def test_a_rank_that_has_ended_is_not_waited_for():
    ranks = Ranks(3)
    ranks.statuses[1]._at_exit()

    def body(rank: int) -> Any:
        if rank == 1:
            return None
        start = time.monotonic()
        try:
            ranks.rendezvous(rank, (0, 1, 2), 30.0).wait("f", "f")
        finally:
            assert time.monotonic() - start < 5

    first, _, third = ranks.run(body)
    text = the_one([first, third], AbsentRankError)
    assert "and some of them have ended" in text and "rank 1 ended" in " ".join(text.split())


def test_a_board_that_is_no_more_says_nothing():
    ranks = Ranks(1)
    leave = ranks.statuses[0]._at_exit
    ranks.statuses.clear()
    gc.collect()
    leave()
    assert StatusStore(ranks.store, 1).read(0) is None


def test_a_rank_that_waits_elsewhere_is_shown_there():
    ranks = Ranks(3)

    def body(rank: int) -> Any:
        if rank == 0:
            time.sleep(0.1)
            ranks.rendezvous(0, (0, 1), SHORT_S).wait("f", "f")
        elif rank == 1:  # waits for one that does not come
            ranks.rendezvous(1, (1, 2), 2 * SHORT_S).wait("g", "g of two")

    first, second, _ = ranks.run(body)
    assert isinstance(first, AbsentRankError) and isinstance(second, AbsentRankError)
    assert "rank 1 waiting in g of two collective 1 of ranks 1-2" in " ".join(str(first).split())
    assert "rank 2 in no collective yet" in " ".join(str(second).split())


def test_who_gives_up_as_the_last_one_comes_stays():
    ranks = Ranks(2)
    rendezvous = ranks.rendezvous(0, (0, 1))
    here = RankStatus("a rendezvous", "", "f", (0, 1))
    store, digest = ranks.statuses[0].store, crc32(b"f")
    error = AbsentRankError("f: rank 1 did not join")
    store.add(here.key, 2 * (ARRIVAL + digest))
    rendezvous._withdraw(here, digest, error)
    assert store.add(here.key, 0) == 2 * (ARRIVAL + digest)
    store.add(here.key, -(ARRIVAL + digest))
    with pytest.raises(AbsentRankError, match="rank 1 did not join"):
        rendezvous._withdraw(here, digest, error)
    assert store.add(here.key, 0) == 0


def test_a_meeting_is_open_until_all_are_there_or_a_fault_is_found():
    ranks = Ranks(2)
    status_store = ranks.statuses[0]
    here = RankStatus("key", "place", "call", (0, 1))
    status_store.write(here)
    assert ranks.statuses[1].read(0) == here and status_store.read(1) is None
    assert status_store.is_open(here) is False, "nobody came"
    status_store.store.add("key", ARRIVAL + 7)
    assert status_store.is_open(here) is True
    status_store.store.add("key", ARRIVAL + 7)
    assert status_store.is_open(here) is False
    status_store.store.add("key", -ARRIVAL)
    status_store.store.set("key/why", "a fault")
    assert status_store.is_open(here) is False
    assert status_store.is_open(RankStatus("")) is False


def test_names_are_told_apart_by_what_the_store_knew_before():
    ranks = Ranks(2)
    names = [ranks.rendezvous(0, (0, 1)).name for _ in range(2)]
    assert names[0] != names[1]
    assert [ranks.rendezvous(1, (0, 1)).name for _ in range(2)] == names
    assert ranks.rendezvous(0, (0,)).name not in names


def test_a_store_that_is_gone_is_an_error_of_its_own():
    ranks = Ranks(1)
    rendezvous = ranks.rendezvous(0, (0,))

    class Gone:
        def set(self, *_: object) -> None:
            raise dist.DistNetworkError("gone")

    ranks.statuses[0].store = Gone()
    with pytest.raises(AbsentRankError, match="f: the store of the process groups cannot be reached") as caught:
        rendezvous.wait("f", "f with its place")
    assert "f with its place" in str(caught.value) and isinstance(caught.value.__cause__, dist.DistNetworkError)


def test_a_store_that_is_gone_leaves_nothing_to_call_at_exit() -> None:
    statuses = StatusStore(dist.HashStore(), 0)
    at_exit = weakref.ref(statuses._at_exit)
    del statuses
    gc.collect()
    assert at_exit() is None
