"""``get_*_state_dict`` and ``set_*_state_dict`` of torch with ``full_state_dict=True``: the dense state, out and in."""

from __future__ import annotations

import warnings
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
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardtensor as st

WAYS = ("fsdp", "parameters", "flows")
KINDS = ("torch", "sharded")
FULL = StateDictOptions(full_state_dict=True)


def stepped(way: str, kind: str = "torch", scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
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
    if kind == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    else:
        optimizer = st.ShardedOptimizer(model, torch.optim.AdamW, lr=0.5)
    model(torch.full((2, 5), scale, dtype=torch.float64, device=device())).square().sum().backward()
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


def gathered(way: str, kind: str) -> None:
    model, optimizer = stepped(way, kind)
    torch.testing.assert_close(everything(model, optimizer), dense())
    kept = get_model_state_dict(model)
    assert isinstance(kept["0.weight"], st.ShardedTensor)  # asked for shards, they stay shards
    first = everything(model, optimizer, StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.testing.assert_close(first, dense(), check_device=False)
        assert {x.device.type for x in first[0].values()} == {"cpu"}
    else:
        assert first == ({}, {})
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    values = plain(get_optimizer_state_dict(model, optimizer, options=flat))
    for name, state in dense()[1].items():
        for key, value in state.items():
            torch.testing.assert_close(values[f"state.{name}.{key}"], value)


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_whole_tensors_as_of_the_dense_model(world, way, kind):
    world(gathered, 3, way=way, kind=kind)


def set_again(way: str, kind: str) -> None:
    want = dense()
    source, its_optimizer = stepped("plain")
    model_state = source.state_dict()
    optimizer_state = get_optimizer_state_dict(source, its_optimizer)
    for from_rank_0 in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        given = not from_rank_0 or dist.get_rank() == 0
        model, optimizer = stepped(way, kind, scale=-3.0)
        set_model_state_dict(model, dict(model_state) if given else {}, options=options)
        set_optimizer_state_dict(model, optimizer, dict(optimizer_state) if given else {}, options=options)
        torch.testing.assert_close(everything(model, optimizer), want, rtol=0, atol=0)
        for param in model.parameters():  # a rank keeps its parts alone
            moment = optimizer.state[param]["exp_avg"]
            assert isinstance(moment, st.ShardedTensor) is isinstance(param, st.ShardedTensor)
    wrong = {**model_state, "0.weight": torch.zeros(2, 5, dtype=torch.float64, device=device())}
    with pytest.raises((RuntimeError, ValueError), match=r"0\.weight"):
        set_model_state_dict(model, wrong, options=FULL)


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_whole_tensors_are_set_as_of_the_dense_model(world, way, kind):
    world(set_again, 3, way=way, kind=kind)


def from_meta(way: str) -> None:
    source, _ = stepped("plain")
    for from_rank_0 in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        if way == "fsdp":
            st.fully_shard(model)
        else:
            st.shard_module(model, {"0": st.colwise("tp", balanced=True), "2": st.rowwise("tp", balanced=True)})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        given = not from_rank_0 or dist.get_rank() == 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`_get_pg|Multiple backends are registered")  # torch's, of its own code
            set_model_state_dict(model, source.state_dict() if given else {}, options=options)
        assert isinstance(model[0].weight, st.ShardedTensor)
        x = torch.ones(2, 5, dtype=torch.float64, device=device())
        torch.testing.assert_close(model(x), source(x))


@pytest.mark.worlds("gloo")
@pytest.mark.parametrize("way", ["fsdp", "flows"])
def test_a_model_on_meta_is_set(world, way):
    world(from_meta, 3, way=way)
