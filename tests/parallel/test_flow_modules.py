"""Flows through modules of other kinds: fused q, k and v, GPT-2's Conv1D, cross attention, modules of a user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoder import Decoder, rules
from harness import device, every_size
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.mesh import Mesh


class Conv1D(nn.Module):
    """A linear layer as GPT-2 stores it: the weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class FusedAttention(nn.Module):
    """q, k and v in one product, laid end to end."""

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.qkv, self.o = linear(8, 24), linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (t.shape[-1] // 2, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Keys and values of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(memory), self.v(memory)
        return self.o(torch.softmax(q.unsqueeze(-2) * k.unsqueeze(-3), 2).mul(v.unsqueeze(-3)).sum(2))


class Mixer(nn.Module):
    """Its own parameters, used in a way that no layer of torch's knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.mix = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale) @ self.mix + self.scale.sum()


class Linear(nn.Module):
    """Named as torch's, and does something else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.square())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) + x


class Channels(nn.Module):
    """A convolution, whose channels are not the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.view(2, 3, 2, 4))


class Around(nn.Module):
    """A mixer between a column- and a row-parallel layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mixer, self.down = nn.Linear(8, 8), Mixer(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.mixer(self.up(x)))


ATTENTION = {"qkv": st.colwise(unit=2, blocks=3), "o": st.rowwise(unit=2)}
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "fused q, k, v": (lambda: FusedAttention(nn.Linear), {"in": "replicate", **ATTENTION}, 1),
    "Conv1D": (lambda: FusedAttention(lambda nx, nf: Conv1D(nf, nx)), {"in": "replicate", **ATTENTION}, 1),
    "Conv1D, each for itself": (lambda: FusedAttention(lambda nx, nf: Conv1D(nf, nx)), ATTENTION, 1),
    "cross attention": (
        CrossAttention,
        {"in": "replicate", "in memory": "replicate", "{q,k,v}": st.colwise(), "o": st.rowwise()},
        2,
    ),
    "features that are cut and gathered on the way": (
        lambda: nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in [(8, 16), (16, 4), (4, 12), (12, 4)])),
        {
            "0": st.colwise(),
            "1": st.rowwise(to="[..., tp]"),
            "2": {"weight": "[out: tp]", "in": "[..., tp] -> replicate", "out": "[..., tp]"},
            "3": st.rowwise(),
        },
        1,
    ),
    "another class of a known name": (
        Named,
        {"in": "replicate", "up": {"weight": "[tp, -]", "in": "replicate", "out": "[..., tp]"}, "down": st.rowwise()},
        1,
    ),
    "a convolution": (
        Channels,
        {"conv": {"weight": "[out: tp]", "bias": "[out: tp]", "in": "replicate", "out": "[-, tp, ...] -> replicate"}},
        1,
    ),
    "a module of one's own": (
        Around,
        {
            "up": st.colwise(),
            "mixer": {"scale": "[tp]", "mix": "[tp, -]", "in": "[..., tp]", "out": "replicate -> [..., tp]"},
            "down": st.rowwise(),
        },
        1,
    ),
}


def same_as_dense(name: str) -> None:
    make, plan, inputs = KINDS[name]
    torch.manual_seed(2)
    dense = make().to(device(), torch.float64)
    module = st.shard_module(copy.deepcopy(dense), plan)
    results = []
    for each in (module, dense):
        values = [
            torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(inputs)
        ]
        values = [x.to(device()).requires_grad_() for x in values]
        y = each(*values)
        y.square().sum().backward()
        grads = [p.grad.full_tensor() if isinstance(p, st.ShardedTensor) else p.grad for p in each.parameters()]
        results.append([y.detach(), *(x.grad for x in values), *grads])
    torch.testing.assert_close(*results)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_modules_of_every_kind_equal_the_dense_ones(world, size, name):
    world(same_as_dense, size, name=name)


def second_input_unsaid() -> None:
    module = st.shard_module(
        CrossAttention().to(device()), {"in": "replicate", "{q,k,v}": st.colwise(), "o": st.rowwise()}
    )
    x = torch.ones(2, 3, 8, device=device())
    module(x, x)  # which wants no gradient
    with pytest.raises(st.RuleError) as caught:
        module(x, memory=x.clone().requires_grad_())
    assert str(caught.value).splitlines() == [
        "CrossAttention: it is not said how `memory` enters, and it wants a gradient",
        "  said    in x",
        "  either  write `in memory: replicate` in the plan",
        "  or      give it without a gradient: detach()",
    ]


@pytest.mark.worlds("sim")
def test_a_second_input_that_is_not_said_is_refused_where_it_wants_a_gradient(world):
    world(second_input_unsaid, 2)


def with_data() -> None:
    """Two by two: each coordinate of dp has a batch of its own."""
    grid: Any = as_group().on_mesh(Mesh((("dp", 2), ("tp", 2))), {})
    torch.manual_seed(5)
    dense = Decoder().to(device(), torch.float64)
    module = st.shard_module(copy.deepcopy(dense), rules("[-, tp, ...]"), process_group=grid)
    st.data_parallel(module, "dp", process_group=grid)
    ids = torch.arange(32, device=device()).view(4, 8) % 16
    mine = ids.chunk(2)[grid.axis("dp").index]
    F.cross_entropy(module(mine).flatten(0, 1), mine.flatten()).backward()
    F.cross_entropy(dense(ids).flatten(0, 1), ids.flatten()).backward()
    for (name, p), q in zip(module.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad.full_tensor() if isinstance(p, st.ShardedTensor) else p.grad, q.grad, msg=name
        )


@pytest.mark.worlds("sim", "gloo")
def test_flows_along_tp_and_data_along_dp(world):
    world(with_data, 4)


def unknown_ids() -> None:
    module = nn.Sequential(nn.Embedding(10, 4)).to(device())
    st.shard_module(module, {"0": {"weight": "[vocab: tp balanced]", "out": "partial(tp) -> replicate"}})
    with pytest.raises(IndexError, match="index out of range in self"):
        module(torch.tensor([3, 10]))


@pytest.mark.worlds("sim")
@every_size
def test_an_id_outside_the_vocabulary_is_an_error_on_every_rank(world, size):
    if device().type == "cpu":  # on CUDA an assert on the device
        world(unknown_ids, size)


class Tied(nn.Module):
    """One weight at both ends, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.first = self.again = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.down(torch.tanh(self.again(self.down(torch.tanh(self.first(x)))))))


TIED = {
    "embed": {"weight": "[vocab: tp balanced]", "out": "partial(tp) -> replicate"},
    "head": {"in": "replicate", "out": "[..., tp balanced] -> replicate"},  # its weight is sharded under the other name
    "{first,again}": st.colwise(balanced=True),
    "down": st.rowwise(balanced=True),
}


def tied() -> None:
    torch.manual_seed(3)
    dense = Tied().to(device(), torch.float64)
    module = st.shard_module(copy.deepcopy(dense), TIED)
    ids = torch.arange(10, device=device()).view(2, 5)
    assert module.head.weight is module.embed.weight and module.first is module.again
    for each in (copy.deepcopy(module), module):  # a copy does the same
        each(ids).square().sum().backward()
        dense.zero_grad()
        dense(ids).square().sum().backward()
        torch.testing.assert_close(each(ids), dense(ids))
        for p, q in zip(each.parameters(), dense.parameters(), strict=True):
            grad = p.grad.full_tensor() if isinstance(p, st.ShardedTensor) else p.grad
            torch.testing.assert_close(grad, q.grad)
    torch.testing.assert_close(st.unshard_module(copy.deepcopy(module))(ids), dense(ids))


@pytest.mark.worlds("sim")
@every_size
def test_tied_weights_and_a_layer_under_two_names(world, size):
    world(tied, size)


def sharded_before() -> None:
    torch.manual_seed(3)
    dense = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to(device())
    module = copy.deepcopy(dense)
    st.shard_parameter(module, "0.weight", "[tp, -]")
    st.shard_module(module, {"0": {"out": "[..., tp]"}, "1": st.rowwise()})
    x = torch.ones(3, 4, device=device())
    torch.testing.assert_close(module(x), dense(x))


@pytest.mark.worlds("sim")
def test_flows_of_parameters_that_were_sharded_before(world):
    world(sharded_before, 2)


def gives_the_whole() -> None:
    plan = dict(KINDS["a module of one's own"][1])
    plan["mixer"] = {**plan["mixer"], "out": "[..., tp]"}
    module = st.shard_module(Around().to(device()), plan)
    with pytest.raises(st.RuleError, match="returns a whole tensor where the plan says that it gives a part"):
        module(torch.ones(2, 8, device=device()))


@pytest.mark.worlds("sim")
def test_a_module_that_gives_other_than_it_says_is_refused(world):
    world(gives_the_whole, 2)
