"""The root's own layers: the embedding, the head, and layers whose parameters its forward uses without calling them."""

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


def steps(kind: type[Net], tied: bool = False) -> None:
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


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("kind", [Net, Borrowing, Recomputing, Holding, HoldingTwo])
def test_steps_are_the_dense_ones(size, kind):
    st.simulate(size, steps, kind)


def test_tied_layers():
    st.simulate(2, steps, Net, True)


def fail() -> tuple[int, bool]:
    """A layer of the root whose forward raises: the next forward is right."""
    model = shard(Net())
    ids = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 99))
    return int(model(ids).shape[-1]), isinstance(model.embed.weight, st.ShardedTensor)


def test_a_layer_that_raises_leaves_the_model_usable():
    assert st.simulate(2, fail) == [(7, True)] * 2
