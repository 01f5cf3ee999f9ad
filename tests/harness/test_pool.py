"""The pool itself: results by rank, failures by rank, ranks that hang, ranks out of step."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

from harness import RankFailed, device, every_size


def describe(offset: int) -> tuple[int, int, float]:
    return dist.get_rank() + offset, dist.get_world_size(), torch.rand(()).item()


@every_size
def test_results_come_by_rank_from_a_world_of_that_size_and_one_seed(world, size):
    results = world(describe, size, offset=10)
    assert [result[:2] for result in results] == [(rank + 10, size) for rank in range(size)]
    assert len({result[2] for result in results}) == 1
    assert results == world(describe, size, offset=10)


def fail_on(rank: int, kind: str) -> None:
    if dist.get_rank() == rank:
        if kind == "exit":
            os._exit(3)
        if kind == "warn":
            warnings.warn("look out")
        assert kind != "assert", "this rank is wrong"
        if kind == "hang":
            threading.Event().wait()
    if kind in ("assert", "exit"):
        dist.all_reduce(torch.ones(1, device=device()))


@pytest.mark.parametrize(
    ("kind", "text"),
    [("assert", "this rank is wrong"), ("warn", "UserWarning: look out"), ("exit", "exit code 3")],
)
def test_a_failure_names_its_rank_and_the_next_job_runs(world, kind, text):
    with pytest.raises(RankFailed, match=rf"(?s)rank 1 of 3 failed.*{text}"):
        world(fail_on, 3, rank=1, kind=kind)
    assert len(world(describe, 3, offset=0)) == 3


def test_ranks_that_hang_are_named_with_where_they_stood(world):
    world(describe, 2, offset=0)  # the world is there already, so that the time runs for the body alone
    with pytest.raises(RankFailed, match=r"(?s)ranks \[1\] of 2 did not return within 1 s.*in fail_on"):
        world(fail_on, 2, rank=1, kind="hang", timeout_s=1.0)
    assert len(world(describe, 2, offset=0)) == 2


def make_unequal() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device=device()), async_op=True)


def test_ranks_out_of_step_fail(world):
    with pytest.raises(RankFailed, match=r"unequal numbers of collectives.*\{0: \d+, 1: \d+\}"):
        world(make_unequal, 2)
