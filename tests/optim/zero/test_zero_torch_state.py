"""torch's functions for optimizer state take a partitioned optimizer, also if some ranks step no parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import shardtensor as st
from shardtensor.comm.process_group import as_group


def round_trip(cls, has_stepped, overlap):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = st.ZeroRedundancyOptimizer(model.named_parameters(), cls, overlap_gradients=overlap, lr=0.1)
    dense = copy.deepcopy(model)
    plain = cls(dense.parameters(), lr=0.1)
    x = torch.ones(2, 3)
    for _ in range(2 if has_stepped else 0):
        for module, each in ((model, optimizer), (dense, plain)):
            each.zero_grad()
            module(x).square().sum().backward()
            each.step()
    optimizer.zero_grad()
    found = get_optimizer_state_dict(model, optimizer)
    want = get_optimizer_state_dict(dense, plain)
    assert found["state"].keys() == want["state"].keys()
    for name, values in want["state"].items():
        for key, value in values.items():
            own = found["state"][name][key]
            own = own.full_tensor() if isinstance(own, st.ShardedTensor) else own
            torch.testing.assert_close(torch.as_tensor(own), torch.as_tensor(value))
    full = {"state": {}, "param_groups": found["param_groups"]}
    for name, values in found["state"].items():
        full["state"][name] = {k: v.full_tensor() if isinstance(v, st.ShardedTensor) else v for k, v in values.items()}
    set_optimizer_state_dict(dense, plain, full)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("cls", [optim.AdamW, optim.Adagrad])
def test_state_dicts_of_torch(world, cls, has_stepped, overlap):
    world(round_trip, 3, cls=cls, has_stepped=has_stepped, overlap=overlap)


def changes():
    model = nn.Linear(3, 2)
    optimizer = st.ZeroRedundancyOptimizer(model.named_parameters(), optim.AdamW, lr=0.1)
    assert not optimizer.state
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state, "on every rank, though the third holds none"
    optimizer.consolidate_state_dict(to=1)
    if as_group().rank == 1:
        assert list(optimizer.state_dict()["state"]) == [0, 1]
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == ["weight", "bias"], "after a step it is by name again, on all ranks"


@pytest.mark.worlds("sim")
def test_a_step_forgets_what_was_consolidated(world):
    world(changes, 3)
