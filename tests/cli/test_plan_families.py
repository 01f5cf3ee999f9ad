"""``shardtensor plan`` tells the cost of every shipped plan, as tables and as JSON, and of plans without flows."""

from __future__ import annotations

import json

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
def test_a_shipped_plan_has_its_tables(capsys, plan, model, world, params):
    args = [plan, "--world", str(world), "--rank", "1", *(["--model", str(config_path(model))] if model else [])]
    for name, value in params.items():
        args += ["--set", f"{name}={str(value).lower()}"]
    found = json.loads(told(capsys, *args, "--format", "json"))
    text = told(capsys, *args)
    assert f"on {world} ranks {found['mesh']}" in text
    assert "rank 1" in text and "bytes of a rank" in text and "tokens a second" in text
    rows = text.split("collectives of a step")[1].split("\na step")[0].splitlines()
    assert rows[1].split() == "when collective over calls received each together where why".split()
    assert {row["kind"] for row in found["collectives"]} <= set(" ".join(rows).split())
    assert all(row["why"] for row in found["collectives"])


def test_a_plan_without_flows_has_its_bytes(capsys, tmp_path):
    path = tmp_path / "two.shard"
    path.write_text(WITHOUT_FLOWS)
    found = json.loads(told(capsys, str(path), "--world", "4", "--format", "json"))
    assert found["memory"]["most"]["parameters"] == 2 * 8 * 8 * 4 // 4
    assert "bytes of a rank" in told(capsys, str(path), "--world", "4")
    assert [row["where"] for row in found["collectives"]] == ["fc.down", "fc.up"]


def test_what_cannot_be_counted_is_named(capsys, tmp_path):
    path = tmp_path / "one.shard"
    path.write_text(WITHOUT_FLOWS.replace("fc.down.weight: [-, tp]", "fc.down.weight: replicate  # or\nfc.other: [tp]"))
    path.write_text(path.read_text() + "dims fc.other (many = 8)\n")
    text = told(capsys, str(path), "--world", "4")
    found = json.loads(told(capsys, str(path), "--world", "4", "--format", "json"))
    assert [each["where"] for each in found["uncounted"]] == ["fc"]
    assert "not counted  fc: it is cut, and operators of its own code compute with that" in text


def test_what_depends_on_the_router_says_so(capsys):
    args = ["mixtral", "--model", str(config_path("mixtral-8x7b")), "--world", "8"]
    found = json.loads(told(capsys, *args, "--format", "json", "--set", "published=true"))
    routed = {(row["where"], row["kind"]) for row in found["collectives"] if "router" in row["why"]}
    block = "model.layers.*.block_sparse_moe"
    assert routed == {
        (block, "all_to_all"),
        (f"{block}.experts.*.w2", "all_reduce"),
        (f"{block}.experts.*", "all_reduce"),
    }
    assert not found["uncounted"]


def test_all_meshes_of_a_search_do_the_same_work(capsys):
    args = ["llama", "--model", str(config_path("llama3-8b")), "--world", "16", "--search", "--memory", "1000GiB"]
    found = json.loads(told(capsys, *args, "--batch", "2", "--seq", "64", "--format", "json"))
    steps = [row["step"] for row in found["choices"] if not row["fault"]]
    assert {round(step["tokens_per_s"] * step["seconds"]) for step in steps} == {2 * 16 * 64} and len(steps) > 1
