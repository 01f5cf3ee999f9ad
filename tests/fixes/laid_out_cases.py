"""Errors of layouts, meshes and costs."""

from __future__ import annotations

import torch
from torch import nn

import shardtensor as st
from fixes.case import Case, placed, step, weight
from shardtensor.cost.profile import read_profile
from shardtensor.fsdp import fully_shard
from shardtensor.mesh import Mesh

CASES: dict[str, Case] = {
    "no hardware of this name": Case(
        lambda: read_profile("h1000"),
        {"name one of these, or the file": lambda: read_profile("h100")},
    ),
    "a reshard of specs alone": Case(
        lambda: st.explain_reshard("[tp, -]", "[-, tp]"),
        {
            'pass shape=(rows, columns) and mesh="tp=4", or a ShardedTensor': lambda: [
                st.explain_reshard("[tp, -]", "[-, tp]", shape=(8, 8), mesh="tp=4"),
                st.explain_reshard(weight(), "[-, tp]"),
            ]
        },
    ),
    "a mesh of other ranks": Case(
        lambda: Mesh((("tp", 2),), (0, 1, 2)),
        {"make the product of the axis sizes equal to the number of ranks": lambda: Mesh((("tp", 3),), (0, 1, 2))},
    ),
    "a mesh with one name twice": Case(
        lambda: Mesh((("tp", 2), ("tp", 2))), {"give each axis its own name": lambda: Mesh((("dp", 2), ("tp", 2)))}
    ),
    "shards with a hole": Case(
        lambda: st.zeros(st.EnumerableShardingSpec(placed(0, 4)), 7),
        {
            "add a shard that starts at (3), or give the true global size": lambda: [
                st.zeros(st.EnumerableShardingSpec([*placed(0, 4), st.ShardMetadata([3], [1], "rank:0/cpu")]), 7),
                st.zeros(st.EnumerableShardingSpec(placed(0, 3)), 6),
            ]
        },
    ),
    "shards past the end": Case(
        lambda: st.zeros(st.EnumerableShardingSpec(placed(0, 3)), 5),
        {"give the true global size": lambda: st.zeros(st.EnumerableShardingSpec(placed(0, 3)), 6)},
    ),
    "a rank that is not in the world": Case(
        lambda: st.zeros(st.ChunkShardingSpec(0, ["rank:0/cpu", "rank:7/cpu"]), 6),
        {"name ranks of the process group": lambda: st.zeros(st.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 6)},
    ),
    "a placement without a rank": Case(
        lambda: st.zeros(st.ChunkShardingSpec(0, ["cpu", "cpu"]), 6),
        {"write the rank too": lambda: st.zeros(st.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 6)},
    ),
    "a plain tensor outside of the unit's forward": Case(
        lambda: Features(wraps=False).features(torch.ones(2, 4)),
        {
            'register_fsdp_forward_method(module, "features")': lambda: (
                Features(wraps=True).features(torch.ones(2, 4)).sum().backward()
            ),
            "call the module itself, or compute with parameter.full_tensor()": lambda: [
                step(Features(wraps=False)),
                torch.ones(2, 4) @ Features(wraps=False).first.weight.full_tensor().t(),
            ],
        },
        mesh="dp=2",
    ),
}


class Features(nn.Module):
    def __init__(self, wraps: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        fully_shard(self)
        if wraps:
            st.register_fsdp_forward_method(self, "features")

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.features(x))
