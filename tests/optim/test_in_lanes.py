"""What a graph does in lanes has the values of one list, bit for bit: clipping, and steps of elementwise classes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

import shardtensor as st
from shardtensor.ops import lanes


class NoStream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def in_lanes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Everything is worked on in lanes; the list has the sizes of the lanes of each list."""
    found: list[list[int]] = []
    split = lanes._split

    def noted(sizes):
        found.append([len(lane) for lane in split(sizes)])
        return split(sizes)

    monkeypatch.setattr(lanes, "_are_recorded", lambda x: True)
    monkeypatch.setattr(lanes, "ONE_LAUNCH", 0)
    monkeypatch.setattr(lanes, "_split", noted)
    monkeypatch.setattr(lanes, "_side_streams", lambda device: [NoStream()])
    monkeypatch.setattr(lanes, "_current_stream", lambda device: NoStream())
    monkeypatch.setattr(lanes, "_entered", nullcontext)
    return found


class Training:
    """Five parameters: uneven, whole, empty on some ranks, in two dtypes and two groups."""

    def __init__(self, make, options) -> None:
        torch.manual_seed(0)
        specs = {
            "a": "[tp balanced, -]",
            "b": "[-, tp balanced]",
            "c": "replicate",
            "d": "[tp balanced]",
            "e": "[tp balanced, -]",
        }
        shapes = {"a": (5, 3), "b": (2, 7), "c": (3,), "d": (1,), "e": (4, 4)}
        self.model = nn.ParameterDict()
        for name, shape in shapes.items():
            value = torch.randn(shape, dtype=torch.bfloat16 if name == "e" else torch.float32)
            self.model[name] = nn.Parameter(st.distribute(value, specs[name]))
        low, high = (
            {"params": [(n, p) for n, p in self.model.items() if (n in "ae") == flag], "lr": 0.1 + flag / 10}
            for flag in (True, False)
        )
        self.optimizer = st.ShardedOptimizer([low, high], make, **options)

    def step(self) -> torch.Tensor:
        for name, param in self.model.items():
            if name != "d":  # one never has a gradient
                param.grad = (param.detach() * 3 + 1).to(param.dtype)
        norm = st.clip_grad_norm_(self.model.values(), 0.7)
        self.optimizer.step()
        return norm

    def values(self) -> list[torch.Tensor]:
        return [p.full_tensor().detach() for p in self.model.values()]


def trained(make, options) -> list[torch.Tensor]:
    training = Training(make, options)
    norms = [training.step() for _ in range(4)]
    return norms + training.values()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (optim.AdamW, {"fused": True}),
        (optim.Adam, {"amsgrad": True, "foreach": True}),
        (optim.SGD, {"momentum": 0.9, "fused": True}),
        (optim.Adagrad, {"lr": 0.1}),
        (optim.RMSprop, {"lr": 0.1, "foreach": True}),
        (optim.NAdam, {}),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_steps_in_lanes_are_those_of_one_list(request, make, options, size):
    want = st.simulate(size, trained, make, options)
    found = request.getfixturevalue("in_lanes")
    got = st.simulate(size, trained, make, options)
    assert any(len(each) == 2 for each in found)
    for ours, theirs in zip(got, want, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x, y)


def test_groups_have_their_parameters_back_even_after_an_error(in_lanes):
    training = Training(optim.SGD, {})
    training.step()
    inner = training.optimizer._inner
    before = [group["params"] for group in inner.param_groups]
    steps = []

    def fail(*args):
        steps.append([len(group["params"]) for group in inner.param_groups])
        raise RuntimeError("fault")

    training.optimizer._inner_step = fail
    with pytest.raises(RuntimeError, match="fault"):
        training.optimizer.step()
    assert steps[0] != [len(params) for params in before]
    assert all(group["params"] is params for group, params in zip(inner.param_groups, before, strict=True))
