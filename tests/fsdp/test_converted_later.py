"""Models that are converted after a step compute in the new dtype, and keep the order and the number of reductions."""

from __future__ import annotations

import torch
from harness import device
from torch import nn

from shardtensor.fsdp import fully_shard


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).to(device())
    for layer in layers:
        fully_shard(layer)
    return fully_shard(layers)


def step(layers, dtype):
    layers(torch.ones(2, 256, dtype=dtype, device=device())).sum().backward()
    layers.zero_grad()


def converted():
    layers = model()
    step(layers, torch.float32)
    layers[0]._fsdp_state.runtime.reducer.resize(4)
    layers.double()
    step(layers, torch.float64)
    found = {flat.unsharded.dtype for layer in layers for flat in layer._fsdp_state.param_groups}
    layers[1].requires_grad_(False)
    step(layers, torch.float64)
    layers[1].requires_grad_(True)
    step(layers, torch.float64)
    reductions = layers[0]._fsdp_state.runtime.reducer
    return found, [group.gradients.position for group in reductions._places], reductions.buffers


def test_a_conversion_after_a_step(world):
    assert world(converted, 2) == [({torch.float64}, [2, 1, 0], 4)] * 2


def replaced():
    layers = model()
    step(layers, torch.float32)
    old = layers[0].weight
    layers[0].weight = nn.Parameter(torch.zeros(256, 256, device=device()))
    step(layers, torch.float32)
    plain = torch.ones(256, 256, device=device())
    return torch.equal((old * plain).full_tensor(), old.full_tensor()), old._param_group


def test_a_parameter_that_was_replaced_is_an_ordinary_tensor(world):
    """No unit gathers it any more, so nothing refuses plain tensors beside it."""
    assert world(replaced, 2) == [(True, None)] * 2
