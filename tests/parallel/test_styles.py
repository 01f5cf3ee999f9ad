"""A style is the same rules in a plan file (std/styles.shard) and in Python (`colwise` and its siblings)."""

from __future__ import annotations

import pytest

import shardtensor as st
from shardtensor.plan.plan import Plan

MESH = "dp=1, kvg=2, kvr=2, tp=2"
STYLES = {
    "colwise(tp)": st.colwise("tp"),
    "colwise(tp, unit=4, blocks=3)": st.colwise("tp", unit=4, blocks=3),
    "colwise(kvg * kvr)": st.colwise(("kvg", "kvr")),
    "colwise_shared(kvg, copies=kvr, unit=4)": st.colwise_shared("kvg", "kvr", unit=4),
    "rowwise(tp, unit=4)": st.rowwise("tp", unit=4),
    "rowwise(tp, to=[-, tp, ...])": st.rowwise("tp", to="[-, tp, ...]"),
    "along([-, tp, ...])": st.along("[-, tp, ...]"),
    "vocab_embedding(tp, pad=64)": st.vocab_embedding("tp", pad=64),
    "vocab_embedding(tp, pad=8, to=[-, tp, ...])": st.vocab_embedding("tp", pad=8, to="[-, tp, ...]"),
    "vocab_head(tp, pad=64)": st.vocab_head("tp", pad=64),
    "vocab_head(tp, pad=8, from=[-, tp, ...])": st.vocab_head("tp", pad=8, came="[-, tp, ...]"),
}


def rules(plan: Plan) -> set[tuple[str, str, str, bool]]:
    """The rules of a plan but for tensors that stay whole: Python leaves these out."""
    lines = (line for line in plan.lines if line.kind != "tensor" or str(line.value) != "replicate")
    return {(line.pattern, f"{line.kind} {line.name}", str(line.value), line.is_optional) for line in lines}


@pytest.mark.parametrize("call", STYLES)
def test_a_style_gives_the_same_rules_in_a_file_and_in_python(call):
    text = f'shard 1\ninclude "std/styles.shard"\nmesh ({MESH})\nlayer: {call}\n'
    assert rules(st.load_plan(text, world=8)) == rules(Plan.from_rules({"layer": STYLES[call]}, MESH))
