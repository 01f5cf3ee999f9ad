"""``shardtensor check --numeric``: what one step shows is told as what reading shows, and fails the check."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from plan.configs import LLAMA_8B
from torch import nn

from shardtensor.cli.main import main

PLAN = """shard 1
param tp = world
mesh (tp)
scale: replicate
block {
    AROUND
    up {
        weight: [tp, -]
        bias:   [tp]
        in:     replicate
        out:    [..., tp]
    }
    down {
        weight: [-, tp]
        bias:   replicate
        in:     [..., tp]
        out:    partial(tp) -> replicate
    }
}
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * self.scale)


def build() -> Any:
    return Scaled()


def check(capsys, tmp_path, around: str, *more: str) -> tuple[int, str]:
    path = tmp_path / "block.shard"
    path.write_text(PLAN.replace("    AROUND\n", f"    {around}\n" if around else ""))
    args = ["check", str(path), "--world", "4", "--numeric", *more]
    code = main(args)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_right_plan_passes(capsys, tmp_path):
    code, _ = check(capsys, tmp_path, "", "--module", f"{__name__}:build")
    assert code == 0


def test_a_sum_that_is_made_twice_fails_at_the_line_of_the_parameter(capsys, tmp_path):
    code, text = check(capsys, tmp_path, "in: replicate grad partial(tp)", "--module", f"{__name__}:build")
    assert code == 1
    assert "block.shard:4:8: error[E405]: the gradient of `scale` is 4 times too large\n" in text
    assert "    4 | scale: replicate\n" in text


def check_shipped(capsys, tmp_path, *args: str) -> tuple[int, str]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    code = main(["check", *args, "--model", str(tmp_path / "config.json"), "--numeric"])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_large_model_on_many_ranks_runs_as_a_tiny_one_on_few(capsys, tmp_path):
    code, text = check_shipped(capsys, tmp_path, "llama", "--world", "4096", "--set", "tp=2", "--set", "sp=true")
    assert code == 0
    last = text.splitlines()[-1]
    assert last.startswith("every gradient is the dense one: a tiny Llama (num_attention_heads 32, ")
    assert last.endswith("on 4 ranks (dp=2, kvg=2, kvr=1) in place of 4,096 (dp=2048, kvg=2, kvr=1)")


@pytest.mark.parametrize(
    ("plan", "args", "ran"),
    [
        ("mlp", ["--world", "64"], "on 16 ranks (tp=16) in place of 64 (tp=64); tp=64 is more than is run here"),
        (
            "llama",
            ["--world", "64", "--set", "tp=32"],
            "on 32 ranks (dp=2, kvg=8, kvr=2) in place of 64 (dp=2, kvg=8, kvr=4); kvr=4 is more than is run here",
        ),
    ],
)
def test_axes_that_do_not_run_as_they_are_are_told(capsys, tmp_path, plan, args, ran):
    """Cuts over more ranks than are run are not what was looked at; of ranks with other samples two are enough."""
    code, text = check_shipped(capsys, tmp_path, plan, *args)
    assert code == 0
    assert text.splitlines()[-1].endswith(ran)


def test_json_tells_what_ran(capsys, tmp_path):
    code, text = check_shipped(capsys, tmp_path, "fsdp", "--world", "4", "--format", "json")
    assert code == 0
    assert json.loads(text)["numeric"].endswith("on 2 ranks (rep=1, dp=2) in place of 4 (rep=1, dp=4)")


def test_a_model_of_no_family_wants_its_own_small_one(capsys, tmp_path):
    dims = ["scale (embed = 8)", *(f"block.{x}.weight (out = 8, in = 8)" for x in ("up", "down"))]
    lines = [f"dims {each}\n" for each in (*dims, *(f"block.{x}.bias (out = 8)" for x in ("up", "down")))]
    code, text = check(capsys, tmp_path, "}\n" + "".join(lines) + "block {")
    assert code == 2
    assert "no tiny model has tensors of such names" in text
    assert "give --module PKG:FN; FN() makes a small one of the same names" in text


def test_without_torch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("shardtensor.cli.check.find_spec", lambda name: None)
    assert main(["check", "mlp", "--world", "2", "--numeric"]) == 2
    err = capsys.readouterr().err
    assert "--numeric needs torch, which is not installed" in err
    assert "pip install torch" in err
