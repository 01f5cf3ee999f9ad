"""What the tests of many ranks share: a pool of real processes, the device to use, and the world sizes to try.

A body is a top-level function of a test module. It runs on every rank of a fresh world, with a default process group
of exactly that size; what it returns comes back as a list, one entry a rank::

    from harness import device, every_size

    def total(scale):
        return as_group().all_reduce(torch.full((2,), scale, device=device())).tolist()

    @every_size
    def test_total(world, size):
        assert world(total, size, scale=3.0) == [[3.0 * size] * 2] * size

Bodies assert on their ranks, too: the failure of a rank fails the test, with that rank's traceback.

The mark ``worlds`` says where a test runs: ``@pytest.mark.worlds("sim")`` on the ranks of a simulated world, which
starts at once and needs no second process; ``@pytest.mark.worlds("sim", "gloo")`` on both; without it on gloo. A body
that runs anywhere asks ``as_group()`` for its rank, and ``as_group().on_mesh(Mesh(...), {})`` for a grid.
SHARDTENSOR_TEST_WORLD=sim, gloo or cuda runs every test there instead. SHARDTENSOR_TEST_FULL=1 tries every combination
of layouts where a test else tries a sample.
"""

from __future__ import annotations

import os

import pytest

from harness.pool import Pool, RankFailed
from harness.simulated import Simulated
from harness.worker import device

FULL = os.environ.get("SHARDTENSOR_TEST_FULL") == "1"
"""Try every combination of layouts, not a sample."""

SIZES = (1, 2, 3, 4)
every_size = pytest.mark.parametrize("size", SIZES)

__all__ = ["FULL", "SIZES", "Pool", "RankFailed", "Simulated", "device", "every_size"]
