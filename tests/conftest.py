"""Fixtures that every folder uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from harness import Pool


@pytest.fixture(scope="session")
def world() -> Iterator[Pool]:
    """Run a body on real ranks: ``world(body, size, **kwargs)``. Gloo on the CPU.

    With SHARDTENSOR_TEST_DEVICE=cuda the same tests run on NCCL; worlds larger than the number of GPUs are skipped.
    """
    pool = _gpu_pool() if os.environ.get("SHARDTENSOR_TEST_DEVICE") == "cuda" else Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gpu_world() -> Iterator[Pool]:
    """The same on NCCL, rank r on ``cuda:r``; for tests marked ``gpu``."""
    pool = _gpu_pool()
    yield pool
    pool.close()


def _gpu_pool() -> Pool:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two to four GPUs and NCCL; this machine has {count}")
    return Pool(min(4, count), "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of a file by world size: a new world costs a second or more on NCCL, a job in a kept one nothing."""
    order = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (order[item.path], _world_size(item)))


def _world_size(item: pytest.Item) -> int:
    call = getattr(item, "callspec", None)
    return call.params.get("size", 0) if call else 0
