"""The first plan of specs/README.md, applied as the page says."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from harness import device
from torch import nn

import shardtensor as st

PAGE = (Path(__file__).parents[2] / "specs" / "README.md").read_text()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())


def applied(text: str) -> None:
    torch.manual_seed(0)
    oracle = Two().double().to(device())
    module = st.shard_module(copy.deepcopy(oracle), st.load_plan(text))
    x = torch.randn(3, 64, dtype=torch.float64, device=device())
    want, got = oracle(x), module(x)
    torch.testing.assert_close(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(module.fc1.weight.grad.full_tensor(), oracle.fc1.weight.grad)
    torch.testing.assert_close(module.fc2.bias.grad, oracle.fc2.bias.grad)


@pytest.mark.worlds("sim", "gloo")
def test_it_gives_the_dense_results(world):
    found = re.search(r"^```shard\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    world(applied, 4, text=found[1])


def test_a_plan_is_taken_by_its_name_too():
    def body():
        torch.manual_seed(0)
        mlp = nn.ModuleDict({"fc1": nn.Linear(512, 2048), "fc2": nn.Linear(2048, 512)})
        want = mlp["fc1"].weight.detach().clone()
        st.shard_module(mlp, "mlp")
        assert str(mlp["fc1"].weight.sharding_spec()) == "[tp, -]"
        assert mlp["fc1"].weight.full_tensor().equal(want)
        with pytest.raises(st.SpecError, match="mpl"):
            st.shard_module(mlp, "mpl")

    st.simulate("tp=2", body)
