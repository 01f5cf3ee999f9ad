"""A bias is added once, wherever the sum is made: also where a row-parallel product leaves as partial sums."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import device
from torch import nn

import shardtensor as st

FC1 = {"weight": "[tp, -]", "bias": "[tp]", "in": "replicate", "out": "[..., tp]"}


class Around(nn.Module):
    """The sum is made by the module around."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


def adds_once(stream: str) -> None:
    torch.manual_seed(0)
    dense = Around().double()
    module = copy.deepcopy(dense)
    fc2 = {"weight": "[-, tp]", "in": "[..., tp]", "out": "partial(tp)"}
    out = "partial(tp) -> replicate" if stream == "replicate" else f"partial(tp) -> {stream}"
    st.shard_module(module, {"mlp": {"0": FC1, "2": fc2, "out": out}, "out": f"{stream} -> replicate"})
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, wanted = module(x), dense(x)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for name, param in dense.named_parameters():
        grad = module.get_parameter(name).grad
        grad = grad.full_tensor() if isinstance(grad, st.ShardedTensor) else grad
        torch.testing.assert_close(grad, param.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.worlds("sim", "gloo")
@pytest.mark.parametrize("stream", ["replicate", "[-, tp, ...]"])
def test_a_bias_of_partials_is_added_once(world, stream):
    world(adds_once, 2, stream=stream)


def gathered() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    module = st.shard_module(copy.deepcopy(dense), {"0": {"weight": "[out: tp]", "out": "[..., tp] -> replicate"}})
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for each in (dense, module):
        each(x).square().sum().backward()
    torch.testing.assert_close(module[0].bias.grad, dense[0].bias.grad)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_whole_bias_of_a_product_that_is_gathered_gets_the_whole_gradient(world, size):
    world(gathered, size)


class OfOnesOwn(nn.Linear):
    """A class that is not known: it works on ShardedTensors, which are summed at once."""


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("to", ["replicate", "[-, tp, ...]"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_layer_of_ones_own_is_summed_once(world, size, to):
    world(_of_ones_own, size, to=to)


def _of_ones_own(to):
    torch.manual_seed(0)
    dense = nn.Sequential(OfOnesOwn(4, 8), nn.ReLU(), OfOnesOwn(8, 4), nn.LayerNorm(4)).double().to(device())
    model = copy.deepcopy(dense)
    rules = {
        "0": {"in": "replicate", **st.colwise("tp")},
        "2": st.rowwise("tp", to=to),
        "3": {**st.along(to), "out": f"{to} -> replicate"} if to != "replicate" else st.along(to),
    }
    st.shard_module(model, rules)
    values = torch.arange(32.0, dtype=torch.float64, device=device()).view(1, 8, 4)
    x, other = values.clone().requires_grad_(), values.clone().requires_grad_()
    want, got = dense(x), model(other)
    torch.testing.assert_close(whole(got), want)
    want.square().sum().backward()
    whole(got).square().sum().backward()
    for (name, p), q in zip(dense.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad, msg=lambda text, name=name: f"{name}: {text}")


def whole(x):
    return x.full_tensor() if isinstance(x, st.ShardedTensor) else x
