"""Whatever a text is, reading it as a plan ends in a plan or in errors with their places, and soon.

``benchmarks/fuzz_plans.py`` reads any number of texts.
"""

from __future__ import annotations

import os
import time

import pytest
from plan_texts import Verdict, text_of, verdict

from shardtensor.errors import SpecError
from shardtensor.plan.text.reading import read_plan
from shardtensor.plan.text.sources import PACKAGED

COUNT = int(os.environ.get("SHARDTENSOR_TEST_PLANS", "600"))
FOUND: tuple[int, ...] = ()
"""Seeds that once ended otherwise."""


@pytest.mark.parametrize("first", range(0, COUNT, 200))
def test_odd_texts(first):
    for seed in range(first, min(first + 200, COUNT)):
        found = verdict(text_of(seed), seed)
        assert not found.problem, f"seed {seed}: {found.problem}"


@pytest.mark.parametrize("seed", FOUND)
def test_texts_that_once_ended_otherwise(seed):
    assert verdict(text_of(seed), seed).problem == ""


STYLES = "".join(f"style s{i}(x) {{\n a: s{i - 1}(x)\n b: s{i - 1}(x)\n}}\n" for i in range(1, 40))
DEFAULTS = "".join(f"style s{i}(x=s{i - 1}(), y=s{i - 1}()) {{\n}}\n" for i in range(1, 40))
LETS = "".join(f"let b{i} = b{i - 1} and b{i - 1}\n" for i in range(1, 300))
LARGE = {
    "brackets": "let x = " + "(" * 100_000,
    "layouts in layouts": "a: " + "[tp unit(" * 50_000,
    "not": "let x = " + "not " * 30_000 + "true",
    "minus": "let x = " + "-" * 100_000 + "1",
    "else": "let x = " + "1 if true else " * 8_000 + "1",
    "a long sum": "let x = 1" + " + 1" * 30_000,
    "a deep product": "let x = " + "(" * 15 + "2" + " * 3)" * 15,
    "blocks": "a {\n" * 20_000 + "}\n" * 20_000,
    "a range": 'a: chunk(dim=0, placements=["rank:0-99999999999"])',
    "many ranges": "".join(f'a{i}: chunk(dim=0, placements=["rank:0-1048575"])\n' for i in range(2000)),
    "digits": "let x = " + "9" * 100_000,
    "a name": "let x = " + "a" * 100_000,
    "names": "".join(f"let x{i} = y{i}\n" for i in range(6000)),
    "styles that double": "style s0(x) {\n w: [x]\n}\n" + STYLES + "m: s39(tp)\n",
    "defaults that double": "style s0() {\n}\n" + DEFAULTS + "m: s39()\n",
    "conditions that double": "let b0 = 1 > 2\n" + LETS + "require b299 \"why\"\n",
    "stars": "*" * 300 + ": replicate",
    "alternatives": "{a,b}" * 3000 + ": replicate",
    "one pattern of alternatives": "{" + ",".join("ab" * i for i in range(1, 300)) + "}: replicate",
    "segments": "**." * 1000 + "a: replicate",
    "comments": "#" * 100_000,
    "lines": "\n" * 130_000,
    "rules": "a: [tp unit(n)]\n" * 6000,
    "quotes": '"' * 100_000,
    "backslashes": 'require true "' + "\\" * 100_000,
    "a mesh": "mesh (" + ", ".join(f"a{i} = 2" for i in range(5000)) + ")",
    "axes of a mesh": "mesh (" + ", ".join(f"a{i} = 1" for i in range(4000)) + ")\na: ["
    + ", ".join(f"a{i}" for i in range(4000)) + "]",
    "factors": "mesh (a " + "(b = 1, c " * 30 + "= 1" + ")" * 30 + ")",
    "too long": "a: replicate\n" * 40_000,
}  # fmt: skip


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_large_texts_have_limits(text):
    found: Verdict = verdict(
        f"shard 1\nlet n = 4\n{text}" if "mesh" in text else f"shard 1\nlet n = 4\nmesh (tp = world)\n{text}"
    )
    assert not found.problem or "took" in found.problem, found.problem
    assert found.seconds < 3  # a bound against explosion; 1 s on a machine that is not busy


def test_includes_have_limits(tmp_path):
    for i in range(200):
        (tmp_path / f"{i}.shard").write_text(f'shard 1\ninclude "{i + 1}.shard"\ninclude "{i + 2}.shard"\n')
    began = time.process_time()
    with pytest.raises(SpecError, match="E003") as caught:
        read_plan(tmp_path / "0.shard", world=1)
    assert time.process_time() - began < 1
    assert caught.value.findings[0].fault == "a plan includes at most 64 files"


def test_what_is_no_text_is_not_included(tmp_path):
    (tmp_path / "bytes.shard").write_bytes(b"shard 1\n\xff\xfe")
    (tmp_path / "folder.shard").mkdir()
    for name in ("bytes.shard", "folder.shard", "/dev/zero", "\\u0000", "a" * 5000):
        path = tmp_path / "main.shard"
        path.write_text(f'shard 1\ninclude "{name}"\n')
        with pytest.raises(SpecError, match="E003"):
            read_plan(path, world=1)


def test_a_plan_runs_no_code():
    text = (PACKAGED / "mlp.shard").read_text()
    for call in ("__import__(os)", "exec(x)", "open(x)", "config.__class__", "().__class__", "world.__init__"):
        with pytest.raises(SpecError):
            read_plan(f"{text}let x = {call}\n", world=1)
