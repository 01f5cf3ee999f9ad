"""Gradients of gradients through flows: the dense ones, or one error that names the way out."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.parallel import layers

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


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [2, 3])
def test_those_of_large_inputs_of_a_stream_are_the_dense_ones_too(world, size, monkeypatch):
    """Their sums run beside the gradients of weights."""
    monkeypatch.setattr(layers, "is_large", lambda x: True)
    world(both, size, stream="cut")
