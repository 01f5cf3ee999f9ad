"""``get_*_state_dict`` and ``set_*_state_dict`` of torch with ``full_state_dict=True``: the dense state, out and in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import device
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import shardtensor as st

WAYS = ("fsdp", "parameters", "flows")
FULL = StateDictOptions(full_state_dict=True)


def stepped(way: str, lr: float = 0.5) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of uneven sizes after one step with gradients that are equal on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double().to(device())
    if way == "fsdp":
        st.fully_shard(model[0])
        st.fully_shard(model)
    elif way == "parameters":
        st.shard_parameter(model, "0.weight", "[-, tp balanced]")
        st.shard_parameter(model, "0.bias", "[tp balanced]")
    elif way == "flows":
        st.shard_module(model, {"0": st.colwise("tp", balanced=True), "2": st.rowwise("tp", balanced=True)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(2, 5, dtype=torch.float64, device=device())).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def plain(values: Any) -> Any:
    """The same values; fails where a tensor is no plain one."""
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    assert type(values) in (torch.Tensor, int, float, bool, list, tuple, type(None)), type(values)
    return values.clone() if isinstance(values, torch.Tensor) else values


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions = FULL) -> Any:
    found = get_optimizer_state_dict(model, optimizer, options=options)
    return plain(get_model_state_dict(model, options=options)), plain(found.get("state", found))


def dense() -> Any:
    model, optimizer = stepped("plain")
    return plain(model.state_dict()), plain(st.optim_state_dict(model, optimizer)["state"])


def gathered(way: str) -> None:
    model, optimizer = stepped(way)
    torch.testing.assert_close(everything(model, optimizer), dense())
    kept = get_model_state_dict(model)
    assert isinstance(kept["0.weight"], st.ShardedTensor)  # asked for shards, they stay shards
    first = everything(model, optimizer, StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.testing.assert_close(first, dense(), check_device=False)
        assert {x.device.type for x in first[0].values()} == {"cpu"}
    else:
        assert first == ({}, {})


@pytest.mark.parametrize("way", WAYS)
def test_whole_tensors_as_of_the_dense_model(world, way):
    world(gathered, 3, way=way)
