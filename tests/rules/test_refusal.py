"""What keeps operands from meeting is said in one line, and the ways out are those that `propagate` weighs."""

from __future__ import annotations

import pytest
from rules.fixed_rules import parse_rule

from shardtensor.layout.bind import bind
from shardtensor.layout.layout import Layout
from shardtensor.mesh import Mesh
from shardtensor.rules.propagate import fault_in, propagate, ways_out
from shardtensor.spec.devices import ChunkShardingSpec
from shardtensor.spec.parse import parse_spec

MESH = Mesh((("dp", 2), ("tp", 4)))


def cut(spec: str, *shape: int) -> Layout:
    return bind(parse_spec(spec), shape, MESH)


FAULTS = {
    "one axis, two letters": (
        "b k, n k -> b n",
        (cut("[-, tp]", 8, 8), cut("[tp, -]", 8, 8)),
        'axis "tp" splits k in the input but n in the weight',
    ),
    "one letter, two axes": (
        "b k, n k -> b n",
        (cut("[-, tp]", 8, 8), cut("[-, dp]", 8, 8)),
        'k is split by axis "tp" in the input but by axis "dp" in the weight',
    ),
    "several axes": (
        "b k, n k -> b n",
        (cut("[-, dp*tp]", 8, 8), cut("[-, dp]", 8, 8)),
        'k is split by axes "dp" * "tp" in the input but by axis "dp" in the weight',
    ),
    "one letter, other pieces": (
        "b k, n k -> b n",
        (cut("[-, tp]", 8, 8), cut("[-, tp sizes(1, 1, 3, 3)]", 8, 8)),
        'axis "tp" splits k at other places in the input than in the weight',
    ),
    "a whole letter": (
        "b !k, k -> b !k",
        (cut("[dp, tp]", 8, 8), (8,)),
        'axis "tp" splits k in the input, which must be whole',
    ),
    "a dim that is broadcast": (
        "b 1, b k -> b k",
        (cut("[-, tp balanced]", 8, 1), cut("[dp, -]", 8, 8)),
        'axis "tp" splits a dim of the input that is broadcast',
    ),
    "other ranks": (
        "b k, n k -> b n",
        (bind(ChunkShardingSpec(0, ["rank:0-1/cpu"]), (8, 8), MESH), cut("[tp, -]", 8, 8)),
        "the input and the weight are on different ranks or grids",
    ),
    "flat": (
        "b k, n k -> b n",
        (cut("flat(dp)", 8, 8), (8, 8)),
        "the input is not sharded along its dims",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_said_in_one_line(name):
    text, operands, fault = FAULTS[name]
    assert fault_in(parse_rule(text), operands, ("input", "weight")) == fault


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_way_out_is_the_one_that_is_taken_and_each_leads_out(name):
    rule, operands = parse_rule(FAULTS[name][0]), FAULTS[name][1]
    ways = ways_out(rule, operands, (4, 4))
    sharding = propagate(rule, operands, (4, 4))
    assert ways[0].moves == tuple((i, need.layout) for i, need in enumerate(sharding.needs) if need.moves)
    for way in ways:
        moved = list(operands)
        for i, layout in way.moves:
            moved[i] = layout
        after = propagate(rule, tuple(moved), (4, 4))
        assert not any(need.moves for need in after.needs)
        assert after.output == way.output
