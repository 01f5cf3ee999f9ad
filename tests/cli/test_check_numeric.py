"""``shardtensor check --numeric``: what one step shows is told as what reading shows, and fails the check."""

from __future__ import annotations

from typing import Any

import torch
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


def test_a_module_has_to_be_given(capsys, tmp_path):
    path = tmp_path / "block.shard"
    path.write_text("shard 1\nparam tp = world\nmesh (tp)\ndims scale (embed = 8)\nscale: [tp]\n")
    assert main(["check", str(path), "--world", "4", "--numeric"]) in (1, 2)
    said = capsys.readouterr()
    assert "--numeric runs a module, and none is given" in said.out + said.err
