"""Copies of fully sharded modules, and what stays of a module's class."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from fsdp.twins import WORLDS, Net, backward, ids_of, loss_of, same_values, shard, train, twins
from torch import nn

import shardtensor as st
from shardtensor.errors import RuleError
from shardtensor.fsdp import FSDPModule, fully_shard


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("when", ["before the first forward", "after a step", "with gradients"])
def test_deepcopy(world: int, tied: bool, when: str) -> None:
    def body() -> None:
        dense, sharded = twins(tied=tied)
        if when != "before the first forward":
            train(dense, sharded, [torch.optim.Adam(m.parameters(), lr=0.1) for m in (dense, sharded)])
        if when == "with gradients":
            backward(dense, sharded)
        other_dense, other = copy.deepcopy(dense), copy.deepcopy(sharded)
        assert type(other) is type(sharded) and isinstance(other.blocks[0], FSDPModule)
        assert not tied or other.head.weight is other.embed.weight
        mine = {id(p) for p in sharded.parameters()}
        assert all(id(p) not in mine for p in other.parameters())
        same_values(dense, other, 1e-9)
        both = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (other_dense, other)]
        train(other_dense, other, both)
        other_dense.zero_grad(), dense.zero_grad(), sharded.zero_grad()
        same_values(dense, sharded)
        train(dense, sharded, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dense, sharded)])
        same_values(other_dense, other)
        block = copy.deepcopy(sharded.blocks[1])
        x = torch.ones(2, 5, dtype=torch.float64)
        torch.testing.assert_close(block(x), dense.blocks[1](x))
        assert torch.equal(copy.copy(sharded)(ids_of(0)[1]), sharded(ids_of(0)[1]))

    st.simulate(world, body)


def test_pickle_is_refused() -> None:
    def body() -> None:
        model = fully_shard(nn.Linear(2, 2))
        with pytest.raises(RuleError, match="state_dict"):
            pickle.dumps(model)

    st.simulate(2, body)


class Scaled(nn.Module):
    """A module with a method and a signature of its own."""

    def __init__(self, size: int, *, by: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.weight) is not st.ShardedTensor and self.weight.shape == (3,)
        return x * self.weight * self.by

    def twice(self) -> float:
        return 2 * self.by


def test_class() -> None:
    def body() -> None:
        model = fully_shard(Scaled(3, by=2.0))
        assert isinstance(model, FSDPModule) and isinstance(model, Scaled)
        assert type(model).__name__ == "FSDPScaled" and model.twice() == 4.0
        made = type(model)(4, by=1.0)
        assert type(made) is Scaled
        plain = Scaled(3, by=1.0)
        assert type(plain) is Scaled and not isinstance(plain, FSDPModule)
        stack = fully_shard(nn.Sequential(*[fully_shard(nn.Linear(2, 2)) for _ in range(3)]))
        assert type(stack).__name__ == "FSDPSequential"
        assert type(stack[1:]) is nn.Sequential and isinstance(stack[1], FSDPModule)
        x = torch.ones(1, 2)
        torch.testing.assert_close(stack[1:](stack[:1](x)), stack(x))

    st.simulate(2, body)


def test_names_and_objects() -> None:
    def body() -> None:
        dense, sharded = twins()
        before = dict(sharded.named_parameters())
        assert list(before) == [name for name, _ in dense.named_parameters()]
        seen = []

        def look(module: Net, *_: object) -> None:
            seen.append([isinstance(p, st.ShardedTensor) for p in module.parameters(recurse=False)])

        sharded.blocks[1].up.register_forward_pre_hook(look)
        sharded.blocks[1].up.register_forward_hook(look)
        train(dense, sharded, [])
        with torch.no_grad():
            sharded(ids_of(0)[1])
        after = dict(sharded.named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
        assert seen and not any(any(each) for each in seen)

    st.simulate(2, body)


def test_after_an_error_in_forward() -> None:
    def body() -> None:
        dense, sharded = twins()
        before = list(sharded.parameters())
        with pytest.raises((RuntimeError, IndexError)):
            sharded(torch.tensor([[99]]))
        assert all(a is b for a, b in zip(before, sharded.parameters(), strict=True))
        train(dense, sharded, [])

    st.simulate(2, body)


def test_gradients_of_inputs_and_of_parameters() -> None:
    def body() -> None:
        dense, sharded = twins()
        x = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5).requires_grad_()
        want = torch.autograd.grad(dense.blocks[0](x).pow(2).sum(), [x])
        block = sharded.blocks[0]
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(block(x).pow(2).sum(), [x]), want)
        assert all(p.grad is None for p in sharded.parameters())
        backward(dense, sharded)
        block.zero_grad(), sharded.zero_grad(), dense.zero_grad()
        params = list(block.parameters())
        with pytest.raises(RuntimeError, match=r"\.backward\(\)"):
            torch.autograd.grad(block(x).sum(), params)
        with pytest.raises(RuntimeError, match=r"\.backward\(\)"):
            block(x).sum().backward(inputs=params)
        with pytest.raises(RuntimeError, match="create_graph"):
            block(x).pow(2).sum().backward(create_graph=True)
        block.zero_grad(), sharded.zero_grad()
        backward(dense, sharded, 1)
        loss_of(sharded(ids_of(0)[1])).backward()

    for world in WORLDS:
        st.simulate(world, body)


def test_gradient_penalty_beside() -> None:
    """Second derivatives with respect to inputs, of what is not fully sharded."""

    def body() -> None:
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        head = shard(Net())
        x = torch.ones(2, 3, requires_grad=True)
        [first] = torch.autograd.grad(dense(x).sum(), [x], create_graph=True)
        (first.pow(2).sum() + loss_of(head(ids_of(0)[1]))).backward()
        assert dense[0].weight.grad is not None and head.head.weight.grad is not None

    st.simulate(2, body)


class Guarded(nn.Linear):
    """It holds what cannot be copied, and says what can be."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock: Any = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = None


def test_a_module_that_says_what_is_copied_is_asked():
    module = fully_shard(Guarded())
    twin = copy.deepcopy(module)
    assert twin.lock is None and module.lock is not None
    assert torch.equal(twin.weight.full_tensor(), module.weight.full_tensor())
