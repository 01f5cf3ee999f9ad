"""``shardtensor plan`` tells the cost of every shipped plan, as tables and as JSON, and of plans without flows."""

from __future__ import annotations

import json
import sys

import pytest
from plan.recorded_models import FROM_DIMS, MORE_WORLDS, case_id, config_path

from shardtensor.cli.main import main

ALONE = [(name, None, 4, {}) for name in ("mlp", "vocab", "uneven")]
"""Of no public model."""

WITHOUT_FLOWS = """shard 1
mesh (tp = world)
dims fc.{up,down}.weight (out = 8, in = 8)
fc.up.weight:   [tp, -]
fc.down.weight: [-, tp]
"""


def told(capsys, *args):
    assert main(["plan", *args]) == 0
    return capsys.readouterr().out


CASES = [case for case in FROM_DIMS + MORE_WORLDS + ALONE if case[:2] != ("fsdp", "mixtral-8x7b")]  # needs its tensors


@pytest.mark.parametrize(("plan", "model", "world", "params"), CASES, ids=case_id)
def test_a_shipped_plan_has_its_tables(capsys, monkeypatch, plan, model, world, params):
    monkeypatch.setitem(sys.modules, "transformers", None)  # which would make the model, and count a step
    args = [plan, "--world", str(world), "--rank", "1", *(["--model", str(config_path(model))] if model else [])]
    for name, value in params.items():
        args += ["--set", f"{name}={str(value).lower()}"]
    found = json.loads(told(capsys, *args, "--format", "json"))
    text = told(capsys, *args)
    assert f"on {world} ranks {found['mesh']}" in text
    assert "rank 1" in text and "bytes of a rank" in text
    assert "the step is not counted: give --module PKG:FN" in text


def test_a_plan_without_flows_has_its_bytes(capsys, tmp_path):
    path = tmp_path / "two.shard"
    path.write_text(WITHOUT_FLOWS)
    found = json.loads(told(capsys, str(path), "--world", "4", "--format", "json"))
    assert found["memory"]["most"]["parameters"] == 2 * 8 * 8 * 4 // 4
    assert "bytes of a rank" in told(capsys, str(path), "--world", "4")
    assert "give --module PKG:FN" in found["not_counted"]
