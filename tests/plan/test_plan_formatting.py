"""Canonical text of plan files: it means the same, keeps comments, and is its own canonical text."""

from __future__ import annotations

import pytest
from test_reading import EXAMPLES, example

from shardtensor.errors import SpecError
from shardtensor.plan.formatting import format_plan
from shardtensor.plan.reading import read_plan
from shardtensor.plan.sources import PACKAGED
from shardtensor.spec.diagnostics import Source

FILES = sorted([*EXAMPLES.glob("*.shard"), *(PACKAGED / "std").glob("*.shard")])


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


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.shard")))
def test_the_meaning_stays(name, tmp_path):
    plan = example(name, 8 if name in ("mixtral", "llama_2d", "llama") else 4)
    (tmp_path / "llama.shard").write_text(formatted((EXAMPLES / "llama.shard").read_text()))
    path = tmp_path / f"{name}.shard"
    path.write_text(formatted((EXAMPLES / f"{name}.shard").read_text()))
    again = read_plan(path, config=plan.config, world=plan.world)
    assert meaning(again) == meaning(plan)


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


override optional  optional z{
}
x: chunk(dim=0, placements=["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:2", "rank:3/cuda:3","rank:4/cuda:3",])
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

override optional z {
}
x: chunk(
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
