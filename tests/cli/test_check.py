"""``shardtensor check``: what it prints, its exit status, and that it waits for nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness.tiny.mlp import MLP
from plan.configs import LLAMA_8B, LLAMA_405B

import shardtensor
from shardtensor.cli.main import main

PLAN = """\
shard 1
param tp = 4
mesh (dp = world / tp, tp)
data dp
fc1 {
    weight: [tp, -]
    out:    [..., tp]
    in:     replicate
}
fc2 {
    weight: [-, tp]
    in:     [..., tp]
    out:    partial(tp) -> replicate
}
dims fc1.weight (out = 12, in = 8)
dims fc2.weight (out = 8, in = 12)
"""

CLEAN = """\
{path} on 4 ranks (dp=1, tp=4): text and layouts checked; no step ran
2 tensors, 192 parameters

layout     tensors  bytes
  [tp, -]        1  384 B
  [-, tp]        1  384 B

bytes of a rank      least   most
  parameters         192 B  192 B
  gradients          192 B  192 B
  optimizer (adamw)  384 B  384 B
  buffers              0 B    0 B

not checked, how values pass between modules: no module is given
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "mlp.shard"
    path.write_text(PLAN)
    return path


def test_a_clean_plan_is_summed_up(plan, capsys):
    assert main(["check", str(plan), "--world", "4"]) == 0
    assert capsys.readouterr().out == CLEAN.format(path=plan)


def test_errors_are_printed_with_how_many_there_are(plan, capsys):
    plan.write_text(PLAN.replace("[tp, -]", "[tp blocks(5), -]").replace("[-, tp]\n", "[tp, -, -]\n"))
    assert main(["check", str(plan), "--world", "4"]) == 1
    out = capsys.readouterr().out
    assert f"{plan}:6:13: error[E206]: dim 0 has 12 elements, not a multiple of its 5 block shares" in out
    assert f"{plan}:11:13: error[E202]: the spec has 3 dims, the tensor has 2" in out
    assert out.endswith("\n\n2 errors\n")


def test_errors_of_the_text_come_in_the_same_way(plan, capsys):
    plan.write_text(PLAN.replace("[tp, -]", "[tpp, -]"))
    assert main(["check", str(plan), "--world", "4", "--format", "json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["code"], finding["line"], finding["col"]) == ("E201", 6, 14)


def test_warnings_fail_when_asked_to(plan, capsys):
    plan.write_text(PLAN + "fc3.weight: replicate\n")
    assert main(["check", str(plan), "--world", "4"]) == 0
    assert main(["check", str(plan), "--world", "4", "--strict"]) == 1
    assert "1 warning\n" in capsys.readouterr().out


def test_wrong_options_are_two(plan, capsys):
    for wrong in (["--world", "0"], ["--set", "tp"], ["--format", "xml"], ["--safetensors", "a", "--module", "b:c"]):
        with pytest.raises(SystemExit, match="2"):
            main(["check", str(plan), *wrong])
    capsys.readouterr()


def small():
    return MLP(8, 12, bias=False)


def test_numbers_are_compared_with_those_of_a_module(plan, capsys):
    assert main(["check", str(plan), "--world", "4", "--numeric", "--module", f"{__name__}:small"]) == 0
    assert "one step gives the dense loss and gradients: MLP on (dp=1, tp=4)" in capsys.readouterr().out


def test_json_has_the_summary(config, capsys):
    assert main(["check", "llama", "--model", str(config), "--world", "16", "--set", "tp=16", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)["summary"]
    assert told["tensors"] == 291 and told["parameters"] == 8_030_261_248
    assert sum(share["tensors"] for share in told["layouts"]) == 291


def test_workflow_commands_of_a_fault_without_a_place(tmp_path, capsys):
    assert main(["check", "nowhere", "--format", "github"]) == 2
    assert capsys.readouterr().out.startswith("::error::there is no such plan%0A")


def test_a_module_tells_its_tensors(plan, tmp_path, monkeypatch, capsys):
    (tmp_path / "built_for_check.py").write_text(
        "from collections import OrderedDict\nfrom torch import nn\n\n\ndef build():\n"
        "    layers = OrderedDict(fc1=nn.Linear(8, 12, bias=False), fc2=nn.Linear(12, 6, bias=False))\n"
        "    return nn.Sequential(layers)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["check", str(plan), "--world", "4", "--module", "built_for_check:build"]) == 0
    assert "2 tensors of" in capsys.readouterr().out
    assert main(["check", str(plan), "--world", "4", "--module", "built_for_check:nothing"]) == 2
    assert "--module built_for_check:nothing is not there" in capsys.readouterr().err


RUN = """
import sys, time
from shardtensor.cli.main import main
status = main(sys.argv[1:])
print("torch" in sys.modules, "numpy" in sys.modules, time.process_time(), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("keys", "plan_name", "world", "tensors", "limit_s"),
    [(LLAMA_8B, "llama", 8, 291, 0.5), (LLAMA_405B, "llama_2d", 16384, 1137, 2)],
    ids=["Llama-3-8B", "Llama-3.1-405B on 16,384 ranks"],
)
def test_it_answers_at_once_and_without_torch(keys, plan_name, world, tensors, limit_s, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys))
    command = [sys.executable, "-c", RUN, "check", plan_name, "--model", str(path), "--world", str(world)]
    command.append("--no-step")
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(shardtensor.__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    assert f"\n{tensors:,} tensors" in done.stdout
    torch, numpy, seconds = done.stderr.split()
    assert (torch, numpy) == ("False", "False")
    assert float(seconds) < 3 * limit_s  # of the processor, all in all; benchmarks/check_speed.py measures


@pytest.mark.parametrize("command", ["check", "plan", "show"])
def test_every_command_reads_a_plan_alike(command, tmp_path, monkeypatch, capsys):
    """What it is asked about is the same plan and model, and so is what it says of a wrong one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.shard").write_text("shard 1\nparam tp = 3\nmesh (tp)\na: [tp]\ndims a (out = config.n)\n")
    (tmp_path / "config.json").write_text('{"n": 8}')
    args = ["wrong.shard", "--model", "config.json", "--world"]
    assert main([command, *args, "2", "--set", "tp=2"]) == 0
    assert main([command, *args, "3"]) != 0
    said = "".join(capsys.readouterr())
    assert "wrong.shard:4:4: error[E205]: 8 elements of dim `out` cannot be split evenly over tp=3" in said
