"""Errors of specs that do not fit a mesh or a shape."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

import shardtensor as st
from fixes.case import Case, grid, linear, mlp, on_cpu, placed, rank, weight
from shardtensor.cost.profile import read_profile


def fits(wrong: str, way: str, *right: str, shape: tuple[int, ...] = (4, 6), mesh: str = "tp=2") -> Case:
    return Case(lambda: st.zeros(wrong, *shape), {way: lambda: [st.zeros(spec, *shape) for spec in right]}, mesh=mesh)


def made(spec: Any, *shape: int) -> st.ShardedTensor:
    return st.zeros(spec, *shape)


CASES: dict[str, Case] = {
    "a chunk of a dim that is not there": Case(
        lambda: made(st.ChunkShardingSpec(2, on_cpu(0, 1)), 4, 6),
        {"use a dim from -2 to 1": lambda: [made(st.ChunkShardingSpec(dim, on_cpu(0, 1)), 4, 6) for dim in (-2, 1)]},
    ),
    "a grid of other dims": Case(
        lambda: made(st.GridShardingSpec([2], on_cpu(0, 1)), 4, 6),
        {
            "give one split for each dim, 1 for a dim that stays whole": lambda: made(
                st.GridShardingSpec([2, 1], on_cpu(0, 1)), 4, 6
            )
        },
    ),
    "a rank twice in a grid": Case(
        lambda: made(st.GridShardingSpec([2, 1], on_cpu(0, 0)), 4, 6),
        {
            "name each rank once, or list the boxes with enum(...)": lambda: [
                made(st.GridShardingSpec([2, 1], on_cpu(0, 1)), 4, 6),
                made('enum([0:2, 0:6] @ "rank:0/cpu", [2:4, 0:6] @ "rank:0/cpu")', 4, 6),
            ]
        },
    ),
    "a coordinate that is not there": fits(
        "[-, -] only(tp, 2)", "use 0 to 1", "[-, -] only(tp, 0)", "[-, -] only(tp, 1)"
    ),
    "axes of a group without any": Case(
        lambda: made("[dp, tp]", 4, 6),
        {
            "pass a DeviceMesh with these mesh_dim_names as process_group": lambda: st.zeros(
                "[dp, tp]", 4, 6, process_group=grid(("dp", 1), ("tp", 2))
            )
        },
        mesh=2,
    ),
    "sizes of a flat part that differ between ranks": fits(
        "[tp balanced, -] flat(dp, sizes=(9, 9))",
        "drop sizes=(...), or cut the dims evenly",
        "[tp balanced, -] flat(dp)",
        "[-, tp] flat(dp, sizes=(9, 6))",
        shape=(5, 6),
        mesh="dp=2, tp=2",
    ),
    "sizes of a flat part that do not add up": fits(
        "flat(tp, sizes=(9, 9))", "give 2 sizes that add up to 24", "flat(tp, sizes=(9, 15))"
    ),
    "a shard without a rank": Case(
        lambda: made(st.EnumerableShardingSpec([st.ShardMetadata([0], [3])]), 3),
        {
            'give each shard a placement such as "rank:0/cuda:0"': lambda: made(
                st.EnumerableShardingSpec([st.ShardMetadata([0], [3], "rank:0/cpu")]), 3
            )
        },
    ),
    "names of dims that have none": fits("[out: tp]", "write the cut by position, such as `[tp, -]`", "[tp, -]"),
    "a dim of another name": Case(
        lambda: linear("[rows: tp]"), {"the dims are out, in": lambda: [linear("[out: tp]"), linear("[in: tp]")]}
    ),
    "too many dims": fits("[tp, -, -, ...]", "write fewer dims", "[tp, -, ...]"),
    "too few dims": fits(
        "[tp]",
        "write one entry for each dim, as in `[-, -]`, or `...` for the dims that stay whole",
        "[tp, -]",
        "[tp, ...]",
    ),
    "padded and balanced": fits("[tp pad(2) balanced, -]", "keep one of the two", "[tp pad(2), -]", "[tp balanced, -]"),
    "a unit that does not divide": fits(
        "[tp unit(3), -]", "choose a unit that divides the dim, or write pad(n)", "[tp unit(2), -]", "[tp pad(6), -]"
    ),
    "sizes of other pieces": fits("[tp sizes(1, 1, 2), -]", "give one size for each piece", "[tp sizes(1, 3), -]"),
    "sizes that cut units": fits(
        "[tp sizes(1, 3) unit(2), -]", "give sizes in whole units", "[tp sizes(4, 0) unit(2), -]"
    ),
    "block shares that do not divide": fits(
        "[tp blocks(2, 1), -]", "give block shares whose sum divides the dim", "[tp blocks(1, 1), -]"
    ),
    "sizes that do not add up": fits("[tp sizes(1, 2), -]", "give sizes that add up", "[tp sizes(1, 3), -]"),
    "shards of other dims": Case(
        lambda: made(st.EnumerableShardingSpec(placed(0, 3)), 4, 6),
        {
            "give every shard one offset and one size for each dim": lambda: made(
                st.EnumerableShardingSpec([st.ShardMetadata([0, 0], [4, 6], "rank:0/cpu")]), 4, 6
            )
        },
    ),
    "shards that overlap in what is brought": Case(
        lambda: st.init_from_local_shards([st.Shard(torch.ones(3), placed(0, 2)[rank()])], 5),
        {
            "give each element to one shard": lambda: st.init_from_local_shards(
                [st.Shard(torch.ones(3), placed(0, 3)[rank()])], 6
            )
        },
    ),
    "a reshard to another shape": Case(
        lambda: st.explain_reshard(weight(), weight(rows=8)),
        {"reshape the tensor first": lambda: st.explain_reshard(weight(columns=12).view(8, 6), weight(rows=8))},
    ),
    "an axis to average over that is not there": Case(
        lambda: st.data_parallel(mlp(), "pp"),
        {"use one of dp, tp": lambda: [st.data_parallel(mlp(), axis) for axis in ("dp", "tp")]},
        mesh="dp=1, tp=2",
    ),
    "a file that is no profile": Case(
        lambda: read_profile(_file("{}")),
        {
            "write a fresh one: shardtensor plan --calibrate FILE": lambda: read_profile(
                _file(read_profile("h100").as_text())
            )
        },
        mesh="",
    ),
}


def _file(text: str) -> Path:
    path = Path(tempfile.mkdtemp(), "profile.json")
    path.write_text(text)
    return path
