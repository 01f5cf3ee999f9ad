"""What plans are told of a real module: the names, shapes, ties and classes that they speak of."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardtensor.parallel.model_info import model_info


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale, self.is_causal, self._calls = 4, 0.5, True, 3
        self.q = nn.Linear(8, 8, bias=False)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, hidden, mask=None, *, position_bias=None, **rest):
        return self.q(hidden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.attn = Attention()
        self.conv = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_parameter("absent", None)

    def forward(self, ids):
        return self.head(self.attn(self.embed(ids)))


def test_tensors_are_those_of_a_state_dict_under_each_of_their_names():
    with torch.device("meta"):
        net = Net()
    found = model_info(net)
    assert {t.name: t.shape for t in found.tensors} == {k: tuple(v.shape) for k, v in net.state_dict().items()}
    assert found.tied == (("embed.weight", "head.weight"),)
    assert found.by_name["attn.mask"].is_buffer and not found.by_name["attn.mask"].requires_grad
    assert found.by_name["attn.mask"].dtype == "bool"


def test_dims_have_names_by_the_kind_of_layer():
    found = model_info(Net()).by_name
    assert found["embed.weight"].dims == ("vocab", "embed")
    assert found["head.weight"].dims == ("out", "in")
    assert found["conv.weight"].dims == ("out", "in", "height", "width")


def test_modules_tell_their_arguments_and_what_they_count():
    attention = model_info(Net()).modules["attn"]
    assert attention.class_name == "Attention"
    assert attention.arguments == ("hidden", "mask", "position_bias")
    assert attention.counts == {"num_heads": 4}


def test_what_wraps_a_module_is_not_seen():
    plain = model_info(Net())
    net = Net()
    net.attn = checkpoint_wrapper(net.attn)
    for wrapped in (net, nn.Sequential()):
        if not len(list(wrapped.children())):
            wrapped.add_module("module", net)  # as DistributedDataParallel has it
        found = model_info(wrapped)
        assert [t.name for t in found.tensors] == [t.name for t in plain.tensors]
        assert found.tied == plain.tied
        assert found.modules["attn"] == plain.modules["attn"]


def test_the_configuration_of_a_module_comes_along():
    class Config:
        def to_dict(self) -> dict[str, int]:
            return {"hidden_size": 8}

    net = Net()
    assert model_info(net).config == {}
    net.config = Config()
    assert model_info(net).config == {"hidden_size": 8}
