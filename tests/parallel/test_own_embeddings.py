"""Embeddings with a forward of their own keep it over cut tables; one that does not call its base is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import device
from torch import nn

import shardtensor as st


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 8.0


class ByHand(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input, self.weight)


RULES = {"0": {"weight": "[tp pad(1), -]", "out": "partial(tp) -> replicate"}}


def gives_the_dense_results() -> None:
    torch.manual_seed(0)
    oracle = nn.Sequential(Scaled(10, 4), nn.Linear(4, 3)).to(device())
    module = st.shard_module(copy.deepcopy(oracle), RULES)
    ids = torch.tensor([[0, 9, 5], [3, 3, 7]], device=device())
    want, got = oracle(ids), module(ids)
    torch.testing.assert_close(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(module[0].weight.grad.full_tensor(), oracle[0].weight.grad)
    assert type(st.unshard_module(copy.deepcopy(module))[0]) is Scaled and isinstance(module[0], Scaled)
    st.shard_module(nn.Sequential(ByHand(10, 4), nn.Linear(4, 3)).to(device()), RULES)(ids)


@pytest.mark.worlds("sim")
def test_their_forward_is_kept_over_a_cut_table(world):
    with pytest.raises(st.RuleError, match=r"ByHand: its forward does not call that of nn\.Embedding"):
        world(gives_the_dense_results, 3)
