"""``Parameter.grad_dtype``: whatever shards a parameter, its gradients are of the dtype that was asked, and add up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import device
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import MixedPrecisionPolicy

pytestmark = [
    pytest.mark.worlds("sim"),
    pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype"),
]

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = ["0.weight", "0.bias", "1.weight"]
FLOWS = {
    "0": {"weight": "[tp, -]", "bias": "[tp]", "in": "replicate", "out": "[..., tp]"},
    "1": {"weight": "[-, tp]", "bias": "replicate", "in": "[..., tp]", "out": "partial(tp) -> replicate"},
}


def _each(module: nn.Module) -> None:
    st.shard_parameter(module, "0.weight", "[tp, -]")
    st.shard_parameter(module, "0.bias", "replicate")
    st.shard_parameter(module, "1.weight", "[-, tp]")


def _resharded(module: nn.Module) -> None:
    _each(module)
    module.get_parameter("0.weight").reshard("[-, tp balanced]")


def _both(module: nn.Module) -> None:
    _each(module)
    for child in module:
        st.fully_shard(child, mesh="dp")
    st.fully_shard(module, mesh="dp")


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "shard_parameter": _each,
    "reshard": _resharded,
    "dict": lambda module: st.shard_module(module, {"0.weight": "[tp, -]", "1.weight": "[-, tp]"}),
    "flows": lambda module: st.shard_module(module, FLOWS),
    "fully_shard": lambda module: st.fully_shard(module),
    "units": lambda module: [st.fully_shard(child) for child in [*module, module]],
    "rows": lambda module: st.fully_shard(module, shard_placement_fn=lambda _: "flat(tp, unit=row)"),
    "both": _both,
    "unsharded again": lambda module: st.unshard_module(st.shard_module(module, {"0.weight": "[tp, -]"})),
}


def _train(module: nn.Module) -> None:
    """Gradients that add up to 1 for each factor in float32, and to 0 in bfloat16."""
    for factor in (256, 1, -256):
        (module(torch.ones(1, 4, dtype=BF16, device=device())).sum() * factor).backward()


def _dense() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).to(device(), BF16)
    for param in module.parameters():
        nn.init.ones_(param)
    return module


def _same(dense: nn.Module, module: nn.Module) -> None:
    for (name, one), other in zip(dense.named_parameters(), module.parameters(), strict=True):
        assert other.grad_dtype == one.grad_dtype, name
        grad = other.grad.full_tensor() if isinstance(other, st.ShardedTensor) else other.grad
        assert grad.dtype == one.grad.dtype, name
        assert torch.equal(grad, one.grad), name


def _asked(way: str, when: str) -> None:
    dense = _dense()
    module = copy.deepcopy(dense)
    for name in NAMES:
        dense.get_parameter(name).grad_dtype = FP32
    if when == "before":
        for name in NAMES:
            module.get_parameter(name).grad_dtype = FP32
    WAYS[way](module)
    if when == "after":
        for name in NAMES:
            module.get_parameter(name).grad_dtype = FP32
    if when == "between":
        module(torch.ones(1, 4, dtype=BF16, device=device())).sum().backward()
        for param in module.parameters():
            param.grad = None
        for name in NAMES:
            module.get_parameter(name).grad_dtype = FP32
    _train(dense)
    _train(module)
    _same(dense, module)


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_of_the_dtype_that_was_asked(world, way, when):
    if way == "both":
        st.simulate("dp=2, tp=2", _asked, way, when)
    else:
        world(_asked, 2, way=way, when=when)


def _set_late() -> Any:
    """Between a forward and its backward, and one that a gradient stands against."""
    module = st.fully_shard(_dense())
    out = module(torch.ones(1, 4, dtype=BF16, device=device())).sum()
    module[0].weight.grad_dtype = None
    module[0].bias.grad_dtype = torch.float64
    out.backward()
    assert module[0].weight.grad_dtype is None
    assert [param.grad.dtype for param in module.parameters()] == [BF16, torch.float64, BF16, BF16]
    with pytest.raises(RuntimeError, match="Cannot set grad_dtype to 'Float'"):
        module[0].weight.grad_dtype = FP32
    with pytest.raises(RuntimeError, match="can only be accessed on leaf tensors"):
        _ = (module[0].weight * 2).grad_dtype


def test_setting_it_late(world):
    world(_set_late, 2)


def _ranks_differ() -> Any:
    """One rank's 256 and another's 1 are summed in float32, unless another dtype of sums is asked."""
    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=BF16)):
        module = nn.Linear(4, 4, bias=False).to(device(), BF16)
        module.weight.grad_dtype = FP32
        st.fully_shard(module, mp_policy=policy)
        factor = [256, 1][as_group().index]
        (module(torch.ones(1, 4, dtype=BF16, device=device())).sum() * factor).backward()
        found.append(module.weight.grad.full_tensor().unique().tolist())
    return found


def test_it_is_the_dtype_of_sums(world):
    assert world(_ranks_differ, 2)[0] == [[128.5], [128.0]]


def _copied(way: str) -> Any:
    model = nn.Sequential(nn.LayerNorm(4, eps=0.0)).to(device(), BF16)
    for param in model.parameters():
        param.grad_dtype = FP32
    cut = "[-, tp, ...]"
    if way == "flows":
        st.shard_module(model, {"in": f"replicate -> {cut}", "0": st.along(cut), "out": f"{cut} -> replicate"})
    elif way == "copies":
        st.shard_module(model, {"0": "replicate"})
    x = torch.tensor([-1.0, 1.0, 1.0, -1.0]).expand(1, 2, 4).to(device(), BF16).contiguous()
    factors = torch.tensor([256.0, 1.0]).to(device(), BF16).view(1, 2, 1)
    (model(x if way == "flows" else st.distribute(x, "[-, tp, -]")) * factors).sum().backward()
    return [param.grad.tolist() for param in model.parameters()]


@pytest.mark.parametrize("way", ["flows", "copies", "plain"])
def test_gradients_of_copies_are_summed_in_the_dtype_that_was_asked(world, way):
    for found in world(_copied, 2, way=way):
        assert found == [[-257.0, 257.0, 257.0, -257.0], [257.0] * 4]  # 256 + 1 is 256 in bfloat16
