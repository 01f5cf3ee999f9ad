"""Ranks that are threads of one process make groups of their own, as torch's threaded backend lets them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard

pytest.importorskip("expecttest", reason="torch's own tests of threads need it")
from torch.testing._internal.common_distributed import MultiThreadedTestCase


class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_subgroups(self) -> None:
        group = as_group()
        half = group.subgroup([0, 1] if dist.get_rank() < 2 else [2, 3])
        other = group.subgroup([dist.get_rank() % 2, dist.get_rank() % 2 + 2])
        for part in (half, other):
            x = torch.tensor([float(dist.get_rank())])
            part.all_reduce(x)
            assert x.item() == sum(part.ranks)

    def test_broadcast(self) -> None:
        x = torch.tensor([float(dist.get_rank())])
        assert as_group().broadcast(x, 2).item() == 2.0

    def test_near_ranks(self) -> None:
        model = torch.nn.Linear(3, 5)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        fully_shard(model, reshard_after_forward=2)
        model(torch.ones(2, 3)).sum().backward()
        torch.testing.assert_close(model.bias.grad.full_tensor(), torch.full((5,), 2.0))
