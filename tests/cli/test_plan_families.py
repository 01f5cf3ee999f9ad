"""``shardtensor plan`` tells the cost of every shipped plan, as tables and as JSON, and of plans without flows."""

from __future__ import annotations

import json

import pytest
from plan.recorded_models import FROM_DIMS, MORE_WORLDS, case_id, config_path

from shardtensor.cli.main import main

pytestmark = pytest.mark.usefixtures("families")

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
def test_a_shipped_plan_has_its_tables(capsys, plan, model, world, params):
    args = [plan, "--world", str(world), "--rank", "1", *(["--model", str(config_path(model))] if model else [])]
    for name, value in params.items():
        args += ["--set", f"{name}={str(value).lower()}"]
    found = json.loads(told(capsys, *args, "--format", "json"))
    text = told(capsys, *args)
    assert f"on {world} ranks {found['mesh']}" in text
    assert "rank 1" in text and "bytes of a rank" in text
    if plan == "uneven":  # it names GPUs, which are not here
        assert "there is no device cuda:3 here" in found["not_counted"]
        return
    rows = text.split("collectives of a step")[1].split("\na step")[0].splitlines()
    assert rows[1].split() == "when collective over calls received each together where".split()
    assert {row["kind"] for row in found["collectives"]} <= set(" ".join(rows).split())
    assert found["flops"] > 0 and "tokens a second" in text


def test_a_plan_without_flows_has_its_bytes(capsys, tmp_path):
    path = tmp_path / "two.shard"
    path.write_text(WITHOUT_FLOWS)
    found = json.loads(told(capsys, str(path), "--world", "4", "--format", "json"))
    assert found["memory"]["most"]["parameters"] == 2 * 8 * 8 * 4 // 4
    assert "bytes of a rank" in told(capsys, str(path), "--world", "4")
    assert "give --module PKG:FN" in found["not_counted"]


def test_rows_of_experts_are_counted_as_if_all_were_chosen_alike(capsys):
    args = ["mixtral", "--model", str(config_path("mixtral-8x7b")), "--world", "8", "--seq", "64"]
    found = json.loads(told(capsys, *args, "--format", "json", "--set", "published=true"))
    sent = [row for row in found["collectives"] if row["kind"] == "all_to_all" and row["received_bytes"] > 1000]
    block = "model.layers.*.block_sparse_moe"
    assert {row["where"] for row in sent} == {block, f"{block}.experts.*.w1"}
    assert {row["received_bytes"] for row in sent} == {64 * 2 * 4096 * 2 * 3 // 4}, "3 of 4 ranks hold other experts"


def test_all_meshes_of_a_search_do_the_same_work(capsys):
    args = ["llama", "--model", str(config_path("llama3-8b")), "--world", "16", "--search", "--memory", "1000GiB"]
    found = json.loads(told(capsys, *args, "--batch", "2", "--seq", "64", "--format", "json"))
    steps = [row["step"] for row in found["choices"] if not row["fault"]]
    assert {round(step["tokens_per_s"] * step["seconds"]) for step in steps} == {2 * 16 * 64} and len(steps) > 1
