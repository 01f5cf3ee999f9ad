"""Gradients of gradients through flows: the dense ones, or one error that names the way out."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.parallel import products

PLANS = {
    "whole": {"0": st.colwise(balanced=True), "2": st.rowwise(balanced=True)},
    "cut": {
        "0": {**st.colwise(balanced=True), "in": "[tp, ...] -> replicate"},
        "2": st.rowwise(balanced=True, to="[tp, ...]"),
    },
}


def penalty(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    [grad] = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    return grad.square().sum()


def both(stream: str) -> None:
    torch.manual_seed(1)
    group = as_group()
    dense = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(device(), torch.float64)
    whole = torch.randn(6, 3, dtype=torch.float64).to(device()).requires_grad_()
    module = st.shard_module(copy.deepcopy(dense), PLANS[stream])
    penalty(dense, whole).backward()
    rows = (
        slice(None) if stream == "whole" else slice(6 // group.size * group.index, 6 // group.size * (group.index + 1))
    )
    x = whole.detach()[rows].clone().requires_grad_()
    penalty(module, x).backward()
    torch.testing.assert_close(x.grad, whole.grad[rows])
    for p, q in zip(module.parameters(), dense.parameters(), strict=True):
        if q.grad is not None:
            grad = p.grad.full_tensor() if isinstance(p, st.ShardedTensor) else p.grad
            torch.testing.assert_close(grad, q.grad)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stream", PLANS)
def test_they_are_the_dense_ones(world, size, stream):
    world(both, size, stream=stream)


def large() -> str:
    module = st.shard_module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(device()), PLANS["cut"])
    x = torch.ones(2, 3, device=device(), requires_grad=True)
    with pytest.raises(st.RuleError) as told:
        penalty(module, x)
    return str(told.value)


@pytest.mark.worlds("sim")
def test_large_inputs_of_a_cut_stream_are_told_the_ways_out(world, monkeypatch):
    monkeypatch.setattr(products, "is_large", lambda x: True)
    assert world(large, 2) == 2 * [
        "gradients of gradients through a stream that is cut are not recorded for large inputs\n"
        "  input   2 x 3\n"
        "  either  let the stream be `replicate` in the plan: its layers record them\n"
        "  or      give each rank less than 16 MiB at a time: such inputs record them"
    ]
