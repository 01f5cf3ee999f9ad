"""Errors of specs and of their classes."""

from __future__ import annotations

import shardtensor as st
from fixes.case import Case, placed, weight
from shardtensor.spec.nodes import Spec
from shardtensor.spec.parse import as_spec

CASES: dict[str, Case] = {
    "a misspelt modifier": Case(
        lambda: st.parse_spec("[tp unti(2), -]"),
        {"did you mean `unit`?": lambda: st.parse_spec("[tp unit(2), -]")},
    ),
    "an axis twice": Case(
        lambda: Spec("tp", "tp"),
        {"keep one of the two, or make the mesh of two axes": lambda: [weight("[tp, -]"), weight("[dp, tp]")]},
        mesh="dp=1, tp=2",
    ),
    "named and in order": Case(
        lambda: Spec("tp", out="tp"),
        {"name all the cut dims, or none": lambda: [Spec(out="tp"), Spec("tp", None)]},
    ),
    "named and in order, in text": Case(
        lambda: st.parse_spec("[tp, in: dp]"), {"every dim in order": lambda: st.parse_spec("[tp, dp]")}
    ),
    "two ellipses": Case(lambda: Spec(..., "tp", ...), {"keep one": lambda: Spec(..., "tp")}),
    "no spec": Case(
        lambda: st.zeros(3.5, 4, 6),
        {'write text such as "[tp, -]", or make a Spec': lambda: [st.zeros("[tp, -]", 4, 6), st.zeros(Spec("tp"), 4)]},
    ),
    "text is wanted": Case(
        lambda: st.parse_spec(Spec("tp", None)), {"as_spec takes objects too": lambda: as_spec(Spec("tp", None))}
    ),
    "an axis that is not there": Case(
        lambda: weight("[pp, -]"), {"use one of dp, tp": lambda: weight("[tp, -]")}, mesh="dp=1, tp=2"
    ),
    "an uneven cut": Case(
        lambda: weight("[tp, -]", 5),
        {
            "`balanced` or `sizes(...)` or `pad(n)`": lambda: [
                weight(f"[tp {modifier}, -]", 5) for modifier in ("balanced", "sizes(3, 2)", "pad(2)")
            ],
            "choose another axis": lambda: weight("[dp, -]", 5),
        },
        mesh="dp=1, tp=2",
    ),
    "shards that overlap": Case(
        lambda: st.EnumerableShardingSpec(placed(0, 2)),
        {"give each element to one shard": lambda: st.EnumerableShardingSpec(placed(0, 3))},
    ),
    "no shards": Case(
        lambda: st.EnumerableShardingSpec([]), {"list every shard": lambda: st.EnumerableShardingSpec(placed(0, 3))}
    ),
    "no placements": Case(
        lambda: st.ChunkShardingSpec(0, []),
        {'name a place, as in ["rank:0/cuda:0"]': lambda: st.ChunkShardingSpec(0, ["rank:0/cuda:0"])},
    ),
    "a grid of other pieces": Case(
        lambda: st.GridShardingSpec([2, 2], ["rank:0/cpu", "rank:1/cpu"]),
        {"name one placement for each piece": lambda: st.GridShardingSpec([2, 1], ["rank:0/cpu", "rank:1/cpu"])},
    ),
    "a shard of other lengths": Case(
        lambda: st.ShardMetadata([0], [1, 2], "rank:0/cpu"),
        {"give one offset and one size for each dim": lambda: st.ShardMetadata([0, 0], [1, 2], "rank:0/cpu")},
    ),
    "a mesh without sizes": Case(
        lambda: st.count_bytes("tp", lambda: 0),
        {
            'name each axis and its size, as in "tp=4" or "dp=2, tp=4"': lambda: [
                st.count_bytes(mesh, lambda: 0) for mesh in ("tp=4", "dp=2, tp=4")
            ]
        },
    ),
}
