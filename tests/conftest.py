"""Fixtures that every folder uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from harness import Pool


@pytest.fixture(scope="session")
def world() -> Iterator[Pool]:
    """Run a body on real ranks: ``world(body, size, **kwargs)``. Gloo on the CPU.

    With SHARDTENSOR_TEST_DEVICE=cuda the same tests run on NCCL, where there are four GPUs.
    """
    device_type = os.environ.get("SHARDTENSOR_TEST_DEVICE", "cpu")
    if device_type == "cuda":
        _need_gpus()
    pool = Pool(4, device_type)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def gpu_world() -> Iterator[Pool]:
    """The same on NCCL, rank r on ``cuda:r``; for tests marked ``gpu``."""
    _need_gpus()
    pool = Pool(4, "cuda")
    yield pool
    pool.close()


def _need_gpus() -> None:
    import torch

    if torch.cuda.device_count() < 4:
        pytest.skip(f"needs four GPUs and NCCL; this machine has {torch.cuda.device_count()}")
