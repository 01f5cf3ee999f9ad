"""How many collectives a step takes, who receives state, and which options exclude each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from zero_models import zero

import shardtensor as st
from shardtensor.comm.process_group import as_group


def counted(mode, count, side):
    params = [nn.Parameter(torch.ones(side, side)) for _ in range(count)]
    optimizer = zero(params, optim.SGD, mode, lr=0.1)
    group, sent = optimizer.group, []
    broadcast, gather = group.broadcast_async, group.all_gather_into
    vars(group)["broadcast_async"] = lambda t, source: (sent.append(t.numel()), broadcast(t, source))[1]
    vars(group)["all_gather_into"] = lambda out, part: (sent.append(out.numel()), gather(out, part))[1]
    for param in params:
        param.grad = torch.ones(side, side)
    try:
        optimizer.step()
    finally:
        del vars(group)["broadcast_async"], vars(group)["all_gather_into"]
    assert all(torch.allclose(param, torch.full_like(param, 0.9)) for param in params)
    return sent


@pytest.mark.worlds("sim")
def test_small_parameters_are_sent_together_and_large_ones_as_they_are(world):
    assert world(counted, 2, mode="owners", count=8, side=4) == [[64, 64]] * 2
    assert world(counted, 2, mode="views", count=8, side=4) == [[64, 64]] * 2
    assert world(counted, 2, mode="ranges", count=8, side=4) == [[128]] * 2
    assert sorted(world(counted, 2, mode="owners", count=3, side=300)[0]) == [300 * 300] * 3


def parts_of_state(partition):
    model = nn.Linear(6, 4)
    optimizer = st.ZeroRedundancyOptimizer(model.named_parameters(), optim.Adam, partition=partition, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    full = st.optim_state_dict(model, optimizer, full=True)
    loaded = st.optim_state_dict_to_load(model, optimizer, full)
    for name, values in loaded["state"].items():
        own = next(record for record in optimizer.partitioned.records.values() if record.name == name)
        assert (
            values["exp_avg"].sharding_spec()
            == st.optim_state_dict(model, optimizer)["state"][name]["exp_avg"].sharding_spec()
        )
        held = values["exp_avg"]._local.numel()
        assert held == own.leaf.numel(), "a rank gets what it steps, and no more"
    return sum(values["exp_avg"]._local.numel() for values in loaded["state"].values())


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("partition", ["owners", "ranges"])
def test_a_rank_receives_the_state_that_it_steps(world, partition):
    assert sum(world(parts_of_state, 3, partition=partition)) == 28


@pytest.mark.parametrize("other", [{"overlap_gradients": True}, {"partition": "ranges"}, {"partition": "rows"}])
def test_options_that_exclude_each_other(other):
    with pytest.raises(ValueError, match=r"partition|overlap"):
        st.ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], optim.SGD, overlap_with_ddp=True, lr=0.1, **other)


def test_the_world_of_one_rank_sends_nothing():
    assert as_group().size == 1
    param = nn.Parameter(torch.ones(2))
    optimizer = st.ZeroRedundancyOptimizer([param], optim.SGD, lr=0.5)
    param.grad = torch.ones(2)
    optimizer.step()
    assert param.tolist() == [0.5, 0.5]
