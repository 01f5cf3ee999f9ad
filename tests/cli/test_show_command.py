"""The command ``shardtensor show``."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from shardtensor.cli.main import main
from shardtensor.cli.show_text import print_scene, scene_of_plan
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims

MODELS = Path(__file__).parents[1] / "plan" / "models"


def show(capsys, *words):
    status = main(["show", *map(str, words)])
    return status, capsys.readouterr()


def written(folder, mesh, spec, dims):
    path = folder / "one.shard"
    path.write_text(f"shard 1\nmesh ({mesh})\ndata dp\nw: {spec}\ndims w ({dims})\n")
    return path


def test_one_tensor(capsys, tmp_path):
    path = written(tmp_path, "dp = 2, tp = 4", "[tp, -]", "out = 8, in = 6")
    status, said = show(capsys, path, "--world", "8")
    assert status == 0
    assert (
        said.out
        == f"""\
{path}
8 ranks (dp=2, tp=4)   samples differ along dp

000000            [tp, -]   out 8 × in 6 float32
111111            w
222222            a rank holds 2 × 6, 48 B; 2 copies, along dp
333333            0 tp 0, ranks 0, 4  1 tp 1, ranks 1, 5  2 tp 2, ranks 2, 6  3 tp 3, ranks 3, 7
                  ████████████████████████ 48 B a rank
"""
    )


def test_ranks_of_a_grid_are_named_by_their_own_characters(capsys, tmp_path):
    _, said = show(capsys, written(tmp_path, "dp = 2, tp = 2", "[tp*dp]", "out = 8"), "--world", "4")
    assert "00221133  " in said.out
    assert "2 tp 0, dp 1, rank 2" in said.out


def test_faults(capsys, tmp_path):
    found, said = show(capsys, "no_such_plan", "--world", "2")
    assert (found, said.out) == (1, "")
    assert "there is no such plan" in said.err
    found, said = show(capsys, written(tmp_path, "dp = 1, tp = 2", "[tp, -]", "out = 7, in = 6"), "--world", "2")
    assert found == 1
    assert "7 elements of dim `out` cannot be split evenly over tp=2" in said.out


def test_a_plan_of_a_real_model(capsys):
    config = MODELS / "llama3-8b" / "config.json"
    status, said = show(capsys, "llama_2d", "--model", config, "--world", "64")
    assert status == 0
    assert "64 ranks (dp=8, kvg=8, kvr=1)   samples differ along dp" in said.out
    assert "model.layers.{0..31}.mlp.{gate_proj,up_proj}.weight  64 tensors" in said.out
    assert "a rank holds 1792 × 4096, 14.0 MiB; 8 copies, along dp" in said.out
    status, said = show(capsys, "llama_2d", "--model", config, "--world", "64", "--tensor", "**.k_proj")
    assert "k_proj" in said.out
    assert "q_proj" not in said.out
    status, said = show(capsys, "llama_2d", "--model", config, "--world", "64", "--tensor", "nothing")
    assert (status, said.err) == (1, "shardtensor show: no tensor is called `nothing`\n")


def test_the_page_of_a_large_model_is_small(capsys, tmp_path):
    out = tmp_path / "page.html"
    config = MODELS / "llama3.1-405b" / "config.json"
    status, said = show(capsys, "llama_2d", "--model", config, "--world", "16384", "--html", out, "--no-step")
    assert status == 0
    assert said.out.startswith(f"{out}: ")
    assert out.stat().st_size < 300_000


def test_experts_that_lie_alike_are_drawn_once(capsys):
    config = MODELS / "mixtral-8x7b-file" / "config.json"
    _, said = show(capsys, "mixtral", "--set", "published=true", "--model", config, "--world", "8")
    assert said.out.count("only(ep, 0)") == 2
    assert "only(ep, 1)" not in said.out
    assert "ep 1 alike: model.layers.{0..31}.block_sparse_moe.experts.{2..3}.{w1,w3}.weight" in said.out


def test_colours_only_where_there_are_some():
    plan = load_plan("mlp", world=2)
    scene = scene_of_plan(resolve(plan, model_from_dims(plan)), "mlp")
    plain, coloured = StringIO(), StringIO()
    print_scene(scene, Console(file=plain, width=100, force_terminal=True, no_color=True, highlight=False))
    print_scene(scene, Console(file=coloured, width=100, force_terminal=True, color_system="256", highlight=False))
    assert "38;5" not in plain.getvalue()
    assert "48;5;69m0" in coloured.getvalue()


@pytest.mark.parametrize("more", [(), ("--html", "page.html", "--no-step")])
def test_torch_is_not_imported(tmp_path, more):
    config = MODELS / "llama3-8b" / "config.json"
    words = ["show", "llama", "--model", str(config), "--world", "8", *more]
    program = (
        "import sys; from shardtensor.cli.main import main\n"
        f"assert main({words!r}) == 0 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=tmp_path)


def test_a_page_counts_the_step_of_a_module(capsys, tmp_path, monkeypatch):
    (tmp_path / "one_mlp.py").write_text(
        "from collections import OrderedDict\nfrom torch import nn\n\n\ndef make():\n"
        "    layers = {'fc1': nn.Linear(8, 16), 'act': nn.GELU(), 'fc2': nn.Linear(16, 8)}\n"
        "    return nn.Sequential(OrderedDict(layers))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "page.html"
    args = ("mlp", "--module", "one_mlp:make", "--world", 4, "--seq", 32, "--html", out)
    assert show(capsys, *args)[0] == 0
    assert main(["plan", *map(str, args[:-2]), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    written = out.read_text()
    (row,) = report["collectives"]
    for words in ("Sequential", "collectives of a step", row["kind"], "saved activations", "a step", "MFU"):
        assert words in written
    assert show(capsys, *args, "--no-step")[0] == 0
    assert "the step is not counted: leave out --no-step" in out.read_text()


def test_two_plans_are_shown_in_one_page_or_below_each_other(capsys, tmp_path):
    config, out = MODELS / "llama3-8b" / "config.json", tmp_path / "page.html"
    args = ("llama", "fsdp", "--model", config, "--world", 8, "--no-step")
    status, said = show(capsys, *args)
    assert status == 0 and said.out.index("llama   ") < said.out.index("fsdp   ")
    assert show(capsys, *args, "--html", out)[0] == 0
    assert out.read_text().count("<pre>") == 2 and out.read_text().count("bytes of a rank") == 3
