"""Frozen parameters: before wrapping, after, between steps; in every case what the dense model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from fsdp.twins import WORLDS, backward, ids_of, loss_of, net, same_values, shard, train, twins
from harness import FULL
from torch import nn

import shardtensor as st
from shardtensor.fsdp import fully_shard


def _norms(model: nn.Module) -> Iterable[torch.Tensor]:
    return [p for name, p in model.named_parameters() if "norm" in name]


def _one(model: nn.Module) -> Iterable[torch.Tensor]:
    return [model.blocks[1].up.bias]


def _block(model: nn.Module) -> Iterable[torch.Tensor]:
    return list(model.blocks[0].parameters())


def _first(model: nn.Module) -> Iterable[torch.Tensor]:
    return [model.embed.weight, *model.blocks[0].parameters()]


def _all_but_one(model: nn.Module) -> Iterable[torch.Tensor]:
    return [p for name, p in model.named_parameters() if name != "blocks.1.norm.bias"]


PARTS: dict[str, Callable[[nn.Module], Iterable[torch.Tensor]]] = {
    "norms": _norms,
    "one": _one,
    "block": _block,
    "first": _first,
    "all but one": _all_but_one,
}


@pytest.mark.parametrize("world", [1, 3] if FULL else [3])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_frozen(world: int, part: str, when: str) -> None:
    def body() -> None:
        dense = net()
        if when == "before":
            _set(dense, part, False)
        sharded = shard(copy.deepcopy(dense))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (dense, sharded)]
        if when == "later":
            train(dense, sharded, optimizers)
        for model in (dense, sharded):
            _set(model, part, False)
        train(dense, sharded, optimizers)
        for model in (dense, sharded):
            _set(model, part, True)
        train(dense, sharded, optimizers)
        for model in (dense, sharded):
            model.requires_grad_(False)
            _set(model, part, True)
        train(dense, sharded, optimizers)

    st.simulate(world, body)


def _set(model: nn.Module, part: str, trains: bool) -> None:
    for param in PARTS[part](model):
        param.requires_grad_(trains)


@pytest.mark.parametrize("world", [1, 3])
def test_in_turns(world: int) -> None:
    """As adversaries do: two parts, each trained while the other is frozen, with gradients that stay in between."""

    def body() -> None:
        dense, sharded = twins()
        for step in range(6):
            for model in (dense, sharded):
                model.requires_grad_(True)
                _set(model, "norms" if step % 2 else "first", False)
            backward(dense, sharded, step)
            if step == 3:
                dense.zero_grad(), sharded.zero_grad()

    st.simulate(world, body)


class LowRank(nn.Module):
    """A frozen layer and a small product beside it that trains."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Linear(layer.in_features, 2, bias=False, dtype=torch.float64)
        self.b = nn.Linear(2, layer.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.b(self.a(x))


@pytest.mark.parametrize("world", WORLDS)
def test_low_rank_updates(world: int) -> None:
    def body() -> tuple[int, int]:
        dense = net().requires_grad_(False)
        for block in dense.blocks:
            block.up = LowRank(block.up)
        sharded = shard(copy.deepcopy(dense))
        small = [[p for p in m.parameters() if p.requires_grad] for m in (dense, sharded)]
        frozen = sharded.blocks[0].up.layer.weight
        before = frozen.full_tensor()
        train(dense, sharded, [torch.optim.AdamW(params, lr=0.05) for params in small])
        assert torch.equal(frozen.full_tensor(), before)
        flats = {id(p._param_group): p._param_group for p in sharded.parameters()}.values()
        return sum(any(flat.trains) for flat in flats), sum(not any(flat.trains) for flat in flats)

    assert st.simulate(world, body)[0] == (3, 4)


def test_what_is_frozen_is_not_reduced() -> None:
    def body() -> list[int]:
        sent: list[int] = []
        _, sharded = twins()
        domain = sharded._fsdp_state.data_mesh
        reduce_scatter = domain.reduce.reduce_scatter_into
        vars(domain.reduce)["reduce_scatter_into"] = lambda out, flat: (sent.append(1), reduce_scatter(out, flat))[1]
        for trains in (True, False, True, False):
            sharded.blocks[0].requires_grad_(trains)
            sharded.embed.requires_grad_(trains)
            for step in range(2):
                sent.clear()
                _only_sharded(sharded, step)
            counts.append(len(sent))
        return counts

    counts: list[int] = []
    st.simulate(1, body)
    assert counts == [4, 3, 4, 3]


def _only_sharded(model: nn.Module, step: int) -> None:
    loss_of(model(ids_of(step)[1])).backward()


def test_integers_beside() -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(12, dtype=torch.int32).view(3, 4), requires_grad=False)
            self.flags = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
            self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.codes.dtype == torch.int32
            return x @ (self.codes * self.scale) * self.flags

    def body() -> None:
        dense = Codes()
        sharded = fully_shard(copy.deepcopy(dense))
        x = torch.arange(6, dtype=torch.float64).view(2, 3)
        for _ in range(2):
            dense(x).sum().backward()
            sharded(x).sum().backward()
            torch.testing.assert_close(sharded.scale.grad.full_tensor(), dense.scale.grad)
        same_values(dense, sharded)

    for world in WORLDS:
        st.simulate(world, body)
