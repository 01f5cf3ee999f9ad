"""Canonical text of plan files: it means the same, keeps comments, and is its own canonical text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtensor.errors import SpecError
from shardtensor.plan.text.formatting import format_plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.plan.text.sources import PACKAGED
from shardtensor.spec.diagnostics import Source

CONFIG = json.loads((Path(__file__).parent / "models" / "llama3-8b" / "config.json").read_text())
FILES = sorted([*PACKAGED.glob("*.shard"), *PACKAGED.glob("std/*.shard"), *PACKAGED.glob("valid/*.shard")])


def formatted(text: str) -> str:
    return format_plan(Source(text, "<plan>"))


def meaning(plan):
    """What a plan says, without where it says it."""
    lines = [(line.pattern, line.kind, line.name, line.value, line.module, line.is_optional) for line in plan.lines]
    stores = [(store.pattern, store.flat, store.by) for store in plan.stores]
    dims = [(dims.pattern, dims.names, dims.sizes) for dims in plan.dims]
    return plan.axes, lines, stores, [(tie.pattern, tie.to) for tie in plan.ties], dims, plan.params


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_canonical_text_is_its_own(path):
    text = formatted(path.read_text())
    assert formatted(text) == text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_meaning_stays(path):
    text = path.read_text()
    try:
        plan = read_plan(Source(text, str(path)), config=CONFIG, world=8)
    except SpecError:  # it is of another model, or world: so it stays
        with pytest.raises(SpecError):
            read_plan(Source(formatted(text), str(path)), config=CONFIG, world=8)
        return
    assert meaning(read_plan(Source(formatted(text), str(path)), config=CONFIG, world=8)) == meaning(plan)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_comment_is_lost(path):
    text = path.read_text()
    comments = [line.partition("#")[2].strip() for line in text.splitlines() if "#" in line]
    kept = [line.partition("#")[2].strip() for line in formatted(text).splitlines() if "#" in line]
    assert kept == comments


def test_one_style():
    written = """\
# who } wrote this

 shard  1 # v


foo.* { # a { b }
  a :[tp unit( 3 ) blocks((2)),-] # first
  "longer":[tp,- ]partial( dp )flat(fs)
 # inner

  } # end }
mesh (dp=world/(tp*(2+3)), # why
  tp) # ranks
let p = -(a+(b)) *((c))
let longer=(a if b else c)if(not(d and(e or f)))else g
"in":replicate
"foo.bar": replicate


optional  optional z{
}
model.layers.mlp.x: chunk(dim=0, placements=["rank:0/cuda:0", 
  "rank:1/cuda:1", "rank:2/cuda:2", "rank:3/cuda:3","rank:4/cuda:3",])
out   1 :replicate->[tp]grad  partial(dp)
# last"""
    canonical = """\
# who } wrote this

shard 1  # v

foo.* {  # a { b }
    a:      [tp blocks(2) unit(3), -]  # first
    longer: [tp, -] flat(fs) partial(dp)
    # inner
}  # end }
# why
mesh (dp = world / (tp * (2 + 3)), tp)  # ranks
let p      = -(a + b) * c
let longer = (a if b else c) if not (d and (e or f)) else g
"in":    replicate
foo.bar: replicate

optional z {
}
model.layers.mlp.x: chunk(
    dim=0,
    placements=["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:2", "rank:3/cuda:3", "rank:4/cuda:3"]
)
out 1: replicate -> [tp] grad partial(dp)
# last
"""
    assert formatted(written) == canonical
    assert formatted(canonical) == canonical


def test_what_is_no_plan_is_refused():
    with pytest.raises(SpecError, match="E001"):
        formatted("shard 1\nfc: [tp\n")
