"""Row-parallel products in chunks: the same sums, and one choice on all ranks."""

from __future__ import annotations

import pytest
import torch
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.sharding.overlap import _in_chunks


def chunks_change_nothing() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).to(device(), torch.float64)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).to(device(), torch.float64)
    module.load_state_dict(dense.state_dict())
    st.shard_module(module, {"0": st.colwise(balanced=True), "1": st.rowwise(balanced=True)})
    x = torch.randn(2, 7, 6, dtype=torch.float64, device=device(), generator=torch.Generator(device()).manual_seed(1))
    for chunks in (1, 2, 3, 20):
        module[1].flow = _in_chunks(module[1].flow, chunks, 0)
        found, wanted = ((m, x.clone().requires_grad_()) for m in (module, dense))
        for m, inp in (found, wanted):
            m.zero_grad()
            m(inp).square().sum().backward()
        torch.testing.assert_close(module(x), dense(x))
        torch.testing.assert_close(found[1].grad, wanted[1].grad)
        torch.testing.assert_close(module[1].weight.grad.full_tensor(), dense[1].weight.grad)
        torch.testing.assert_close(module[1].bias.grad, dense[1].bias.grad)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [2, 3])
def test_chunks_change_nothing_but_the_order_of_work(world, size):
    world(chunks_change_nothing, size)


def one_choice() -> dict[str, int]:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device())
    st.shard_module(module, {"0": st.colwise(), "2": st.rowwise()})
    chosen = st.choose_overlap(module, tokens=32, rounds=2, shows=False)
    product = module[2].flow.product
    assert chosen == {"2": 1 if product is None else product.chunks}
    return chosen


def test_all_ranks_choose_alike(world):
    first, second = world(one_choice, 2)
    assert first == second
