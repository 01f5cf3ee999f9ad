"""Factories make tensors on the device that is asked for: device=, a `torch.device` context, or a placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardtensor as st
from shardtensor.errors import LayoutError

FACTORIES = {
    "empty": lambda **to: st.empty("[tp balanced, -]", 4, 6, **to),
    "zeros": lambda **to: st.zeros("[tp balanced, -]", 4, 6, **to),
    "ones": lambda **to: st.ones("[-, tp]", 4, 6, **to),
    "full": lambda **to: st.full("flat(tp)", (4, 6), 3, **to),
    "rand": lambda **to: st.rand("[tp balanced, -]", 4, 6, **to),
    "randn": lambda **to: st.randn("[-, -]", 4, 6, **to),
}
DEVICES = [
    "cpu",
    "meta",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_take_a_device_and_follow_contexts(name: str, device: str) -> None:
    def body() -> list[Any]:
        make = FACTORIES[name]
        torch.manual_seed(3)
        named = make(device=device)
        torch.manual_seed(3)
        with torch.device(device):
            within = make()
        torch.manual_seed(3)
        with torch.device("meta"):
            despite = make(device=torch.device(device))
        made = [named, within, despite]
        for each in made:
            assert each.device.type == each.local_shards()[0].tensor.device.type == device
        if device != "meta" and name != "empty":
            torch.manual_seed(3)
            dense = {"zeros": torch.zeros, "ones": torch.ones, "rand": torch.rand, "randn": torch.randn}.get(name)
            whole = torch.full((4, 6), 3) if dense is None else dense(4, 6, device=device)
            assert all(torch.equal(each.full_tensor().cpu(), whole.cpu()) for each in made)
        return [each.requires_grad for each in made]

    st.simulate("tp=3", body)


def test_a_tensor_of_a_named_device_moves_and_trains() -> None:
    def body(device: str) -> list[float]:
        w = st.rand("[tp balanced, -]", 5, 4, device=device, requires_grad=True)
        (w.reshard("[-, tp]") * 2).sum().backward()
        assert w.grad is not None and w.grad.device.type == device
        return w.grad.full_tensor().flatten().tolist()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert st.simulate("tp=2", body, device) == [[2.0] * 20] * 2


def test_a_module_of_meta_factories_is_made_real_later() -> None:
    def body() -> torch.Tensor:
        linear = torch.nn.Linear(4, 6, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(st.empty("[tp, -]", 6, 4, device="meta"))
        linear.to_empty(device="cpu")
        torch.nn.init.ones_(linear.weight)
        return linear(torch.ones(1, 4)).full_tensor()

    assert all(torch.equal(out, torch.full((1, 6), 4.0)) for out in st.simulate("tp=2", body))


def test_a_spec_that_names_devices_decides_by_itself() -> None:
    spec = 'chunk(dim=0, placements=["rank:0-1/cpu"])'

    def body() -> str:
        assert st.zeros(spec, 4, device="cpu").device.type == "cpu"
        assert st.zeros(spec, 4, device="meta").device.type == "meta"
        with torch.device("meta"):
            assert st.zeros(spec, 4).device.type == "cpu"
        with pytest.raises(LayoutError) as caught:
            st.zeros(spec, 4, device="cuda:0")
        assert st.zeros("[tp]", 4, device="cpu").device.type == "cpu"  # the way out that the message names
        return str(caught.value)

    assert (
        st.simulate("tp=2", body)
        == [
            "device=cuda:0 is asked of a spec that names the device of each rank\n"
            '  spec  chunk(dim=0, placements=["rank:0-1/cpu"])\n'
            "  fix   leave device= out, or write a spec of axes, as [tp, -]"
        ]
        * 2
    )


def test_a_device_that_is_not_there_is_an_error_of_every_rank() -> None:
    def body() -> str:
        with pytest.raises(LayoutError, match="there is no device cuda:99 here") as caught:
            st.rand("[tp]", 4, device="cuda:99")
        return str(caught.value)

    first, second = st.simulate("tp=2", body)
    assert first == second


def test_several_placements_may_share_a_device() -> None:
    shared = "cuda:0" if torch.cuda.is_available() else "cpu"
    spec = st.ChunkShardingSpec(0, [f"rank:{rank}/{shared}" for rank in range(4)])

    def body() -> torch.Tensor:
        return st.ones(spec, 8, 2).reshard("[-, tp balanced]").full_tensor().cpu()

    assert all(torch.equal(out, torch.ones(8, 2)) for out in st.simulate("tp=4", body))
