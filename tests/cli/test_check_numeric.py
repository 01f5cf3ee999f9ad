"""``shardtensor check --numeric``: what one step shows is told as what reading shows, and fails the check."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
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


def check_shipped(capsys, tmp_path, config: dict[str, Any], *args: str) -> tuple[int, str]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = main(["check", *args, "--model", str(tmp_path / "config.json"), "--numeric"])
    said = capsys.readouterr()
    return code, said.out + said.err


LLAMA = {"model_type": "llama", **LLAMA_8B}
GATED = {"model_type": "gated", "architectures": ["GatedForCausalLM"], "hidden_size": 8}


class GatedForCausalLM(Scaled):
    """Of a made-up family, as transformers has them."""

    def __init__(self, config: Any) -> None:
        assert config.hidden_size == 8
        super().__init__()


@pytest.fixture
def transformers(monkeypatch):
    """What the command needs of transformers; it knows one model."""
    auto = SimpleNamespace(for_model=lambda model_type, **keys: SimpleNamespace(**keys, to_dict=lambda: keys))
    found = SimpleNamespace(GatedForCausalLM=GatedForCausalLM, AutoConfig=auto)
    monkeypatch.setitem(sys.modules, "transformers", found)


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(("around", "fails"), [("", 0), ("in: replicate grad partial(tp)", 1)])
def test_the_model_of_a_small_config_is_run(capsys, tmp_path, around, fails):
    (tmp_path / "config.json").write_text(json.dumps(GATED))
    code, text = check(capsys, tmp_path, around, "--model", str(tmp_path / "config.json"))
    assert code == fails
    begin = "what ran" if fails else "one step gives the dense loss and gradients"
    assert text.splitlines()[-1] == f"{begin}: a GatedForCausalLM on (tp=4)"
    code, text = check(capsys, tmp_path, around, "--model", str(tmp_path / "config.json"), "--format", "json")
    assert json.loads(text)["step"] == "a GatedForCausalLM on (tp=4)"


def test_a_large_model_of_ones_own_is_not_run(capsys, tmp_path):
    code, text = check(capsys, tmp_path, "", "--module", f"{__name__}:build_large")
    assert code == 2
    assert "134,217,816 parameters on 4 ranks are too many for one process" in text
    assert "FN() makes a small one of the same names" in text


def build_large() -> Any:
    module = Scaled()
    module.block.up.weight = nn.Parameter(torch.empty(1).expand(8, 1 << 24))
    return module


def test_without_transformers_it_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    small = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    code, text = check_shipped(capsys, tmp_path, LLAMA | small, "llama", "--world", "2")
    assert code == 2
    assert "transformers, which makes the model of a config.json, is not installed" in text
    assert "install transformers" in text


def test_a_model_without_code_wants_a_module(capsys, tmp_path):
    dims = ["scale (embed = 8)", *(f"block.{x}.weight (out = 8, in = 8)" for x in ("up", "down"))]
    lines = [f"dims {each}\n" for each in (*dims, *(f"block.{x}.bias (out = 8)" for x in ("up", "down")))]
    code, text = check(capsys, tmp_path, "}\n" + "".join(lines) + "block {")
    assert code == 2
    assert "--numeric: no module is given" in text
    assert "give --module PKG:FN; FN() makes a small one of the same names" in text


def test_without_torch_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["check", "mlp", "--world", "2", "--numeric"]) == 2
    err = capsys.readouterr().err
    assert "--numeric: torch is not installed" in err
    assert "pip install torch" in err
