"""`full_state_dict`: the dense state dict, out of a model sharded in any way, for programs that know no sharding."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group

SIZES = (1, 3)
WAYS = ("plain", "parameters", "fsdp", "flows", "mixed")


def net() -> nn.Sequential:
    """Uneven sizes, buffers of two dtypes, a parameter under two names, and one of another dtype."""
    torch.manual_seed(0)
    first, second = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
    model = nn.Sequential(nn.Embedding(7, 5), first, nn.GELU(), second, nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False))
    model[5].weight = model[0].weight
    second.to(torch.bfloat16)
    return model.to(device())


def made(way: str) -> nn.Module:
    model = net()
    if way == "parameters":
        st.shard_parameter(model, "1.weight", "[tp balanced, -]")
        st.shard_parameter(model, "1.bias", "flat(tp)")
        st.shard_parameter(model, "3.weight", "[-, tp balanced]")
    elif way == "fsdp":
        st.fully_shard(model[1])
        st.fully_shard(model)
    elif way == "flows":
        st.shard_module(model, {"1": st.colwise("tp", balanced=True), "3": st.rowwise("tp", balanced=True)})
    elif way == "mixed":
        st.shard_module(model, {"1.weight": "[tp balanced, -]", "{0,5}.weight": "[-, tp balanced]"})
    return model


def same(found: Any, want: Any) -> None:
    assert list(found) == list(want)
    for key, x in want.items():
        assert not isinstance(found[key], nn.Parameter | st.ShardedTensor), key
        assert found[key].dtype == x.dtype and torch.equal(found[key].to(x.device), x), key


def everywhere(way: str) -> None:
    model, dense = made(way), net().state_dict()
    full = st.full_state_dict(model)
    same(full, dense)
    assert full["0.weight"] is full["5.weight"]
    assert not any(x.requires_grad for x in full.values())
    first = st.full_state_dict(model, rank0_only=True, cpu_offload=True)
    if as_group().rank:
        assert first == {}
    else:
        same(first, dense)
        assert {x.device.type for x in first.values()} == {"cpu"}


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_the_dense_state_dict(world, size, way):
    world(everywhere, size, way=way)


def test_the_dense_state_dict_of_processes(world):
    world(everywhere, 3, way="fsdp")


def back(way: str) -> None:
    other = made(way)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(st.full_state_dict(made(way)))
    same(st.full_state_dict(other), net().state_dict())


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_model_takes_it_back(world, way):
    world(back, 3, way=way)


def stepped(way: str) -> Any:
    model = made(way).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    optimizer = st.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    out = model(torch.arange(6, device=device()))
    (out.full_tensor() if isinstance(out, st.ShardedTensor) else out).square().mean().backward()
    optimizer.step()
    state = {"step": 1, "all": [model.state_dict(), st.optim_state_dict(model, optimizer)]}
    kept = st.full_state_dict(state)
    alone = st.full_state_dict(state, rank0_only=True, cpu_offload=True)
    assert (alone == {}) is bool(as_group().rank)
    if alone:
        assert alone["all"][1]["param_groups"] == kept["all"][1]["param_groups"] and alone["step"] == 1
        for name, values in kept["all"][1]["state"].items():
            same(alone["all"][1]["state"][name], {key: torch.as_tensor(x) for key, x in values.items()})
    return kept


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("way", ["fsdp", "parameters"])
def test_state_dicts_of_optimizers_and_nested_ones(world, way):
    (want,) = world(stepped, 1, way="plain")
    for found in world(stepped, 3, way=way):
        for key, x in want["all"][0].items():
            torch.testing.assert_close(found["all"][0][key], x)
        states = found["all"][1]["state"]
        assert states.keys() == want["all"][1]["state"].keys()
        for name, values in want["all"][1]["state"].items():
            torch.testing.assert_close(states[name], values)


def of_some_ranks() -> list[Any]:
    group = as_group()
    inside, outside = group.subgroup((0, 2)), group.subgroup((1, 2))
    state = {"in": st.ones("[tp balanced]", 5, process_group=inside)}
    found = st.full_state_dict(state, rank0_only=True)
    other = {"out": st.ones("[tp balanced]", 5, process_group=outside)}
    if group.rank:
        assert st.full_state_dict(other, rank0_only=True) == {}
    else:
        with pytest.raises(RuntimeError, match="rank 0 is not a member of the group of ranks"):
            st.full_state_dict(other, rank0_only=True)
    return [x.tolist() for x in found.values()]


@pytest.mark.worlds("sim")
def test_tensors_of_some_of_the_ranks(world):
    assert world(of_some_ranks, 3) == [[[1.0] * 5], [], []]


def saved(folder: str) -> None:
    model = made("fsdp")
    for act in (safetensors.torch.save_file, lambda state, path: torch.save(state["1.weight"].untyped_storage(), path)):
        with pytest.raises(st.RuleError, match=r"shardtensor\.full_state_dict\(model\), called by all ranks"):
            act(model.state_dict(), folder + "/refused")
    full = st.full_state_dict(model, rank0_only=True, cpu_offload=True)
    if not as_group().rank:
        del full["5.weight"]  # safetensors takes no tensor twice
        safetensors.torch.save_file(full, folder + "/model.safetensors")
        loaded = safetensors.torch.load_file(folder + "/model.safetensors")  # which has an order of its own
        same({key: loaded[key] for key in full}, full)


@pytest.mark.worlds("sim")
def test_what_safetensors_refuses_names_the_way_out(world, tmp_path):
    world(saved, 2, folder=str(tmp_path))
