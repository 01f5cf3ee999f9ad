"""Hooks on what a module gives."""

from __future__ import annotations

import pytest
import torch
from harness import device, every_size
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group

pytestmark = pytest.mark.worlds("sim")


def output() -> None:
    size, rank = as_group().size, as_group().rank
    dense = torch.arange(6.0 * size, device=device()).view(2, 3 * size)
    x = st.distribute(dense, "[tp balanced, -]", requires_grad=True)
    module = st._reshard_output(nn.ReLU(), "[-, tp]")
    y = module(x)
    assert y.sharding_spec() == st.parse_spec("[-, tp]")
    assert torch.equal(y.full_tensor(), dense)
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), (dense > 0).float())
    assert module(dense) is not None
    local = st._collect_local_shard(module)(x)
    assert type(local) is torch.Tensor
    assert torch.equal(local, dense[:, 3 * rank : 3 * rank + 3])
    rows = st.distribute(torch.arange(2.0 * size).view(size, 2), f'chunk(dim=0, placements=["rank:0-{size - 1}/cpu"])')
    assert st._collect_local_shard(nn.Identity())(rows).tolist() == [2.0 * rank, 2.0 * rank + 1]


@every_size
def test_a_module_gives_another_layout_or_its_part(world, size):
    world(output, size)
