"""Modules with flows that were copied, pickled or saved whole do what the module does, and can be unsharded."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import Decoder, rules
from harness import device
from test_flow_modules import KINDS
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": saved,
}


def results(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    y = module(*inputs)
    y.square().sum().backward()
    whole = [p.grad.full_tensor() if isinstance(p, st.ShardedTensor) else p.grad for p in module.parameters()]
    return [y.detach(), *(grad.clone() for grad in whole)]


def read_back(way: str, name: str) -> None:
    make, plan, inputs = KINDS[name]
    torch.manual_seed(2)
    dense = make().to(device(), torch.float64)
    values = [torch.rand(2, 3, 8, dtype=torch.float64).to(device()) for _ in range(inputs)]
    want = results(dense, *values)
    module = st.shard_module(dense, plan)
    twin = WAYS[way](module)
    assert [type(x) for x in twin.modules()] == [type(x) for x in module.modules()]
    torch.testing.assert_close(results(twin, *values), want)
    torch.testing.assert_close(results(module, *values), want)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    torch.testing.assert_close(results(module, *values), want)  # its own memory
    again = st.unshard_module(WAYS[way](module))
    assert not any(isinstance(p, st.ShardedTensor) for p in again.parameters())
    torch.testing.assert_close(results(again, *values), want)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_back_does_the_same(world, size, way, name):
    world(read_back, size, way=way, name=name)


def decoder_on_a_mesh(axes: Any) -> None:
    torch.manual_seed(0)
    dense = Decoder().to(device(), torch.float64)
    ids = torch.arange(12, device=device()).view(2, 6)
    want = results(dense, ids)
    mesh = torch.distributed.init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    module = st.shard_module(dense, rules("[-, tp balanced, ...]", balanced=True), process_group=mesh)
    twin = saved(module)
    torch.testing.assert_close(results(twin, ids), want)
    subgroup = twin.layers[0].mlp.down.flow.leave[0].subgroup
    assert tuple(subgroup.ranks) == tuple(as_group(mesh).axis("tp").ranks)
    assert saved(module).layers[0].mlp.down.flow.leave[0].subgroup is subgroup  # one group for all that is read


@pytest.mark.worlds("gloo")
def test_a_module_on_a_mesh_is_read_back(world):
    world(decoder_on_a_mesh, 4, axes=None)


def loss_and_experts() -> None:
    loss = st.ParallelCrossEntropy(6, "[..., tp]")
    logits, target = torch.randn(4, 3), torch.tensor([0, 5, 2, 3])
    torch.testing.assert_close(saved(loss)(logits, target), loss(logits, target))
    moe = st.MoE(nn.Linear(8, 4, bias=False), st.GatedExperts(4, embed=8, hidden=6), top_k=2).to(device())
    x = torch.randn(5, 8).to(device())
    with torch.no_grad():
        want = moe(x)
    st.shard_module(moe, {"experts.gate_up_proj": "[ep, -, -]", "experts.down_proj": "[ep, -, -]"})
    torch.testing.assert_close(saved(moe)(x), want)


@pytest.mark.worlds("sim")
def test_losses_and_experts_are_read_back(world):
    world(loss_and_experts, 2)


def another_place() -> Any:
    module = st.shard_module(nn.Sequential(nn.Linear(4, 4)), {"0": st.rowwise()})
    return as_group().exchange_objects(pickle.dumps(module[0].flow))[0]


def from_the_first() -> str:
    written = another_place()
    if as_group().rank == 0:
        return pickle.loads(written).leave[0].subgroup.size
    with pytest.raises(RuntimeError, match="rank at save time was 0, but at load time was 1"):
        pickle.loads(written)
    return 2


def test_a_rank_does_not_take_the_place_of_another(world):
    assert world(from_the_first, 2) == [2, 2]


def test_a_world_of_others_is_told():
    [written, _] = st.simulate(2, another_place)
    with pytest.raises(RuntimeError, match="init_process_group"):
        pickle.loads(written)
    for size, fault in ((1, "a module was pickled by a group of other ranks"), (3, "save time was 2, but at load")):
        with pytest.raises((RuntimeError, ValueError), match=fault):
            st.simulate(size, pickle.loads, written)
