"""Fixtures that every folder uses."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from harness import FULL, Pool, Simulated, examples  # noqa: F401  (examples loads the profile of hypothesis)
from harness.progress import Progress, file_of, longest_first
from harness.quick import left_out

START = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    """Report progress from the process that sees all tests; let files run in the order in which they are collected."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "progress")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # by the number of tests of a file


def pytest_runtest_setup() -> None:
    """With SHARDTENSOR_TEST_MINUTES=N no test begins after so many minutes: the long sweeps fit into a box of time."""
    minutes = float(os.environ.get("SHARDTENSOR_TEST_MINUTES", "inf"))
    if time.monotonic() - START > 60 * minutes:
        pytest.skip(f"did not begin within {minutes:g} minutes")


def _chosen_world() -> str | None:
    """Where every test shall run, if the environment says so."""
    kind = os.environ.get("SHARDTENSOR_TEST_WORLD")
    return "cuda" if kind is None and os.environ.get("SHARDTENSOR_TEST_DEVICE") == "cuda" else kind


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked ``worlds("sim", "gloo")`` in each of these."""
    marker = metafunc.definition.get_closest_marker("worlds")
    if "world" in metafunc.fixturenames and marker is not None and _chosen_world() is None:
        metafunc.parametrize("world", marker.args, indirect=True, scope="session")


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Pool | Simulated:
    """Run a body on every rank of a world: ``world(body, size, **kwargs)``. On gloo; see `harness` for other worlds.

    With SHARDTENSOR_TEST_DEVICE=cuda the same tests run on NCCL; worlds larger than the number of GPUs are skipped.
    """
    kind = getattr(request, "param", None) or _chosen_world() or "gloo"
    return Simulated() if kind == "sim" else request.getfixturevalue(f"{kind}_pool")


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[Pool]:
    """Real processes on the CPU, started with the first job."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def cuda_pool() -> Iterator[Pool]:
    """Real processes on NCCL."""
    pool = _gpu_pool()
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run a sample, unless all are asked for or one is named; the longest files first.

    The tests of a file run by world size: a new world costs a second on NCCL.
    """
    if not FULL and not any("::" in arg for arg in config.args):
        out = left_out(items)
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=list(out))
    order = longest_first([item.nodeid for item in items])
    items.sort(key=lambda item: (order[file_of(item.nodeid)], _world_size(item)))


def _world_size(item: pytest.Item) -> int:
    call = getattr(item, "callspec", None)
    return call.params.get("size", 0) if call else 0
