"""Large layers of a container: gathered by themselves, and no different in what comes out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fsdp.twins import WORLDS, Net, shard
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.fsdp import parts


@pytest.fixture(autouse=True)
def small_layers_are_large(monkeypatch):
    monkeypatch.setattr(parts, "LARGE", 16)


class Borrowing(Net):
    """Its embedding is its second head, too."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + F.linear(self.embed(ids) * 0.5, self.embed.weight)


class Recomputing(Net):
    """The same inside of a checkpoint."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + checkpoint(self.second, ids, use_reentrant=False)

    def second(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) @ self.embed.weight.t()


class Holding(Net):
    """A layer that is never called itself."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(super().forward(ids), self.unused.weight)

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(7, 7)


class HoldingTwo(Holding):
    """The same with both its parameters."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(Net.forward(self, ids), self.unused.weight, self.unused.bias)


def steps(kind: type[Net], tied: bool = False) -> list[str]:
    group = as_group()
    torch.manual_seed(0)
    dense = (kind(tied=True) if tied else kind()).double()
    model = shard(copy.deepcopy(dense))
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, dense))
    for step in range(4):
        ids = torch.randint(7, (2 * group.size, 3), generator=torch.Generator().manual_seed(step))
        dense(ids).pow(2).mean().backward()
        model(ids[2 * group.index : 2 * group.index + 2]).pow(2).mean().backward()
        for (name, param), (same, twin) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
            assert name == same
            assert (param.grad is None) == (twin.grad is None), name
            if twin.grad is not None:
                torch.testing.assert_close(param.grad.full_tensor(), twin.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for param, twin in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), twin.detach())
    return [unit.name for unit in model._fsdp_unit.schedule.units]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("kind", [Net, Borrowing, Recomputing, Holding, HoldingTwo])
def test_steps_are_the_dense_ones(size, kind):
    names = st.simulate(size, steps, kind)[0]
    assert [name for name in names if name in ("embed", "head")] == ["embed", "head"]


def test_tied_layers_are_no_parts():
    assert "embed" not in st.simulate(2, steps, Net, True)[0]


def borrow() -> tuple[list[bool], list[bool]]:
    """What a part's parameter is for the container while it runs, and what to others."""
    seen: list[bool] = []

    class Looking(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            seen.append(isinstance(self.embed.weight * 1, st.ShardedTensor))
            self.embed.weight.data.mul_(1)  # a write goes to the shards
            return super().forward(ids)

    model = shard(Looking())
    before = isinstance(model.embed.weight * 1, st.ShardedTensor)
    model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    return seen, [before, isinstance(model.embed.weight * 1, st.ShardedTensor)]


def use_outside() -> str:
    model = shard(Net())
    with pytest.raises(RuleError) as caught:
        F.linear(torch.ones(1, model.embed.weight.shape[1]), model.embed.weight)
    return str(caught.value)


def test_outside_of_its_container_a_part_is_named_as_the_container_has_it():
    said = st.simulate(2, use_outside)
    assert said[0] == said[1]
    assert "module        (Net)\n  parameter     embed.weight\n" in said[0]


def test_a_container_sees_wholes_and_others_shards():
    assert st.simulate(2, borrow)[1] == ([False], [True, True])


def fail() -> tuple[int, bool]:
    """A part whose forward raises: the next forward is right."""
    model = shard(Net())
    ids = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 99))
    return int(model(ids).shape[-1]), isinstance(model.embed.weight, st.ShardedTensor)


def test_a_part_that_raises_leaves_the_model_usable():
    assert st.simulate(2, fail) == [(7, True)] * 2
