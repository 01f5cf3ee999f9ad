"""``shardtensor plan``: what it prints is what the parts say; bytes need no torch and no time; faults are told."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from harness.tiny.llama import LlamaForCausalLM
from plan.configs import LLAMA_405B, SMALL
from plan.recorded_models import config_path

from shardtensor.cli.main import main
from shardtensor.cli.plan_report import seconds_text
from shardtensor.cost.profile import read_profile


@pytest.fixture
def config(tmp_path):
    """The path of a config.json with some keys."""

    def write(keys):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(keys))
        return str(path)

    return write


@pytest.fixture
def _llamas(monkeypatch):
    """What the command needs of transformers: it makes a Llama of each configuration."""

    def made(config):
        heads, width = config["num_attention_heads"], config["hidden_size"]
        sizes = {
            "width": width, "heads": heads, "kv": config["num_key_value_heads"], "head_dim": width // heads,
            "hidden": config["intermediate_size"], "vocab": config["vocab_size"], "layers": config["num_hidden_layers"],
        }  # fmt: skip
        with torch.device("meta"):
            return LlamaForCausalLM(**sizes).to(torch.bfloat16)

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.setattr("shardtensor.cli.model_source.transformers_model", made)


traced = pytest.mark.usefixtures("_llamas")


def report(capsys, *args):
    assert main(["plan", *args, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@traced
def test_the_report_adds_up(capsys, config):
    told = report(
        capsys,
        "llama_2d",
        "--model",
        config(SMALL | {"vocab_size": 1152}),
        "--world",
        "12",
        "--set",
        "tp=3",
        "--seq",
        "63",
        "--rank",
        "5",
    )
    assert "not_counted" not in told, told["not_counted"]
    memory, step = told["memory"], told["step"]
    for held in memory.values():
        parts = ("parameters", "gradients", "optimizer", "master_weights", "buffers", "gathered", "activations")
        assert held["total"] == sum(held[name] for name in parts)
    assert memory["least"]["total"] <= memory["rank"]["total"] <= memory["most"]["total"]
    assert memory["rank"]["rank"] == 5
    along_data = [row for row in told["collectives"] if row["over"] == "dp"]
    inside = [row for row in told["collectives"] if row["over"] != "dp"]
    assert along_data and inside
    assert sum(row["seconds"] for row in along_data) == pytest.approx(step["beside_s"])
    assert sum(row["seconds"] for row in inside) == pytest.approx(step["inside_s"])
    spent = max(step["compute_s"], step["beside_s"]) + step["inside_s"] + step["optimizer_s"]
    assert step["seconds"] == pytest.approx(spent)
    assert step["tokens_per_s"] == pytest.approx(4 * 63 / spent)
    peak = read_profile("h100").flops("bfloat16") / read_profile("h100").efficiency
    assert step["mfu"] == pytest.approx(told["flops"] / (step["seconds"] * peak)) and told["recomputed_flops"] == 0
    assert sum(row["bytes"] for row in told["activations"]) == memory["most"]["activations"]
    assert told["parameters"] == 2 * 96 * 1152 + 2 * (2 * 96 * 96 + 2 * 96 * 48 + 3 * 96 * 240 + 2 * 96) + 96


def test_without_a_step_there_are_bytes_and_the_way_to_the_rest(capsys, config, monkeypatch):
    args = ("llama", "--model", config(SMALL), "--world", "6", "--set", "tp=3")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for more, words in (((), "give --module PKG:FN"), (("--no-step",), "leave out --no-step")):
        found = report(capsys, *args, *more)
        assert found["memory"]["most"]["total"] > found["memory"]["most"]["activations"] == 0
        assert not {"step", "collectives", "flops"} & found.keys() and words in found["not_counted"]
    assert main(["plan", *args]) == 0
    assert "the step is not counted: give --module PKG:FN" in capsys.readouterr().out
    assert main(["plan", *args[:-2], "--search"]) == 0
    assert "meshes, the fewest bytes first" in capsys.readouterr().out


@traced
def test_a_step_that_does_not_run_is_said_with_its_reason(capsys, config):
    args = ("llama_2d", "--model", config(SMALL), "--world", "12", "--set", "tp=3")
    found = report(capsys, *args, "--seq", "64")
    assert "--seq 64" in found["not_counted"] and "cannot be cut evenly over 3 ranks" in found["not_counted"]
    assert report(capsys, *args, "--seq", "63")["collectives"]


def test_a_plan_that_cannot_be_applied_has_no_step(capsys, tmp_path, monkeypatch):
    (tmp_path / "wrong_flows.py").write_text(
        "from collections import OrderedDict\nfrom torch import nn\n\n\ndef make():\n"
        "    layers = {'fc1': nn.Linear(8, 12, bias=False), 'fc2': nn.Linear(12, 8, bias=False)}\n"
        "    return nn.Sequential(OrderedDict(layers))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "wrong.shard"
    path.write_text(
        "shard 1\nmesh (tp = world)\nfc1 {\n weight: [tp, -]\n in: replicate\n out: [..., tp]\n}\n"
        "fc2 {\n weight: [-, tp]\n in: [..., tp]\n out: replicate\n}\n**.bias: replicate\n"
        "dims fc1.weight (out = 12, in = 8)\ndims fc2.weight (out = 8, in = 12)\n"
    )
    args = (str(path), "--world", "4", "--module", "wrong_flows:make")
    assert "error[E402]: `out: replicate` contradicts" in report(capsys, *args)["not_counted"]


def test_a_module_of_ones_own_is_traced_with_its_step(capsys, tmp_path, monkeypatch):
    (tmp_path / "two_layers.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Two(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)\n\n"
        "    def forward(self, x, scale):\n        return self.down(self.up(x) * scale)\n\n\n"
        "def step(module, sample):\n    return module(torch.ones(3, 8, device='meta'), 2.0).sum()\n\n\n"
        "def with_step():\n    return Two(), step\n\n\ndef alone():\n    return Two()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "two.shard"
    path.write_text(
        'shard 1\ninclude "std/styles.shard"\nmesh (tp = world)\nup: colwise(tp)\ndown {\n bias: replicate\n'
        " weight: [-, tp]\n in: [..., tp]\n out: partial(tp) -> replicate\n}\n"
    )
    args = (str(path), "--world", "4", "--module")
    (row,) = report(capsys, *args, "two_layers:with_step")["collectives"]
    assert (row["kind"], row["where"], row["received_bytes"]) == ("all_reduce", "down", 2 * 3 * 3 * 8 * 4 // 4)
    assert "scale" in report(capsys, *args, "two_layers:alone")["not_counted"]


@traced
def test_layers_are_told_once(capsys, config):
    two, four = (
        report(capsys, "llama", "--model", config({**SMALL, "num_hidden_layers": n}), "--world", "6", "--set", "tp=3")
        for n in (2, 4)
    )
    assert len(two["collectives"]) == len(four["collectives"])
    starred = [[row["calls"] for row in told["collectives"] if "*" in row["where"]] for told in (two, four)]
    assert [2 * calls for calls in starred[0]] == starred[1]


@traced
def test_a_search_prints_the_meshes_and_why_others_are_none(capsys, config):
    assert main(["plan", "llama", "--model", config(SMALL), "--world", "12", "--search", "--seq", "66"]) == 0
    out = capsys.readouterr().out
    assert "meshes, the shortest step first" in out
    assert "tp=3, sp=true" in out
    assert "E106: requirement not met: every rank needs whole query heads" in out
    assert main(["plan", "llama", "--model", config(SMALL), "--world", "12", "--search", "--memory", "1KiB"]) == 0
    assert "no mesh passes" in capsys.readouterr().out


@traced
def test_text_shows_the_tables(capsys, config):
    assert main(["plan", "llama", "--model", config(SMALL), "--world", "6", "--set", "tp=3"]) == 0
    out = capsys.readouterr().out
    for words in ("bytes of a rank", "collectives of a step", "a step", "tokens a second"):
        assert words in out


@traced
def test_a_users_profile_is_taken(capsys, config, tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text(read_profile("cpu").as_text())
    args = ("llama", "--model", config(SMALL), "--world", "6", "--set", "tp=3", "--hardware")
    assert report(capsys, *args, str(mine))["step"] == report(capsys, *args, "cpu")["step"]


def test_the_batch_is_of_each_data_rank(capsys, config):
    args = ("llama", "--model", config(SMALL), "--world", "6", "--set", "tp=3", "--seq", "32")
    one, three = report(capsys, *args), report(capsys, *args, "--batch", "3")
    assert (one["batch"], three["batch"]) == (2, 6)


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["llama", "--world", "6", "--set", "tp=4"], 1, "error[E"),
        (["llama", "--world", "8", "--hardware", "h1000"], 1, "there is no hardware profile `h1000`"),
        (["llama", "--world", "6", "--set", "tp=3", "--rank", "6"], 1, "the plan has no rank 6"),
        (["llama", "--world", "6", "--set", "tp=3", "--optimizer", "lamb"], 1, 'no optimizer is called "lamb"'),
        ([], 2, "name a plan, or --calibrate FILE"),
    ],
)
def test_faults_are_told(capsys, config, args, status, words):
    assert main(["plan", *args, *(["--model", config(SMALL)] if args else [])]) == status
    assert words in capsys.readouterr().err


def test_bytes_of_405b_on_16384_ranks_take_less_than_two_seconds_and_no_torch(config):
    program = (
        "import sys, time\n"
        "from shardtensor.cli.main import main\n"
        f"options = ['--model', {config(LLAMA_405B)!r}, '--world', '16384', '--rank', '9000', '--no-step']\n"
        "main(['plan', 'llama_2d', *options])\n"
        "print('torch' in sys.modules, time.process_time())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    has_torch, spent = done.stdout.splitlines()[-1].split()
    assert has_torch == "False"
    assert float(spent) < 2  # of the processor, which others may be using, too


def test_times_are_told_in_units():
    assert [seconds_text(s) for s in (0, 3e-6, 0.02, 2.5)] == ["-", "3 us", "20 ms", "2.5 s"]


def test_a_plan_that_does_not_fit_says_so(config, capsys):
    told = ["plan", "llama", "--model", config(SMALL), "--world", "3"]
    assert main([*told, "--memory", "80GiB"]) == 0
    assert "fits into 80.00 GiB" in capsys.readouterr().out
    assert main([*told, "--memory", "1MB"]) == 1
    assert "does not fit: a rank needs" in capsys.readouterr().out
    assert main([*told, "--memory", "1MB", "--format", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["fits"], report["memory_bytes"]) == (False, 10**6)


@pytest.mark.parametrize("text", ["80", "80 XB"])
def test_a_memory_without_a_unit_is_refused(capsys, text):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "llama", "--memory", text])
    assert caught.value.code == 2
    assert f"{text} is no size; give it a unit, as in 80GiB" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 12, 64])
@pytest.mark.parametrize(("plan", "model"), [("llama", "llama3-8b")])
def test_the_defaults_of_a_plan_fit_the_world_and_are_no_fallbacks(capsys, plan, model, ranks):
    args = ["--model", str(config_path(model))]
    assert main(["check", plan, "--world", str(ranks), *args]) == 0
    assert "N001" not in capsys.readouterr().out


@traced
def test_all_meshes_of_a_search_do_the_same_work(capsys, config):
    args = ["llama", "--model", config(SMALL), "--world", "12", "--search", "--memory", "1000GiB"]
    assert main(["plan", *args, "--batch", "2", "--seq", "66", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [row["step"] for row in found["choices"] if not row["fault"]]
    assert {round(step["tokens_per_s"] * step["seconds"]) for step in steps} == {2 * 12 * 66} and len(steps) > 1


def test_master_weights_are_float32_copies_with_float32_state(capsys, config):
    args = ("llama", "--model", config(SMALL | {"dtype": "bfloat16"}), "--world", "6", "--set", "tp=3", "--no-step")
    short, master = (report(capsys, *args, *more)["memory"]["most"] for more in ((), ("--master-weights",)))
    assert (short["master_weights"], short["optimizer"]) == (0, 2 * short["parameters"])
    assert master["master_weights"] == 2 * short["parameters"] == master["optimizer"] // 2
    assert master["total"] - short["total"] == 2 * short["parameters"] + short["optimizer"]
    assert main(["plan", *args, "--master-weights"]) == 0
    assert "float32 master weights" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *args, "--master-weights", "--zero", "ranges"])


@traced
def test_checkpointed_activations_are_computed_once_more_and_not_saved(capsys, config):
    args = ("llama", "--model", config(SMALL), "--world", "6", "--set", "tp=3")
    full, layers, some = (
        report(capsys, *args, *more)
        for more in ((), ("--checkpoint-activations",), ("--checkpoint-activations", "model.layers.*.mlp"))
    )
    assert layers["checkpoint_activations"] == "" and some["checkpoint_activations"] == "model.layers.*.mlp"
    for each in (layers, some):
        assert each["memory"]["most"]["activations"] < full["memory"]["most"]["activations"]
        assert 0 < each["recomputed_flops"] == each["flops"] - full["flops"]
        assert each["step"]["mfu"] * each["step"]["seconds"] == pytest.approx(
            full["step"]["mfu"] * full["step"]["seconds"]
        )
    assert layers["recomputed_flops"] > some["recomputed_flops"]
    assert main(["plan", *args, "--checkpoint-activations"]) == 0
    out = capsys.readouterr().out
    assert "of them to recompute checkpointed modules" in out and "MFU" in out and "saved activations" in out
    assert "no module matches `nothing`" in report(capsys, *args, "--checkpoint-activations", "nothing")["not_counted"]


@traced
def test_a_search_holds_master_weights_and_checkpointed_layers(capsys, config):
    args = [
        "plan",
        "llama",
        "--model",
        config(SMALL | {"dtype": "bfloat16"}),
        "--world",
        "6",
        "--search",
        "--seq",
        "66",
    ]
    found = []
    for more in ([], ["--master-weights"], ["--checkpoint-activations"]):
        assert main([*args, *more, "--format", "json"]) == 0
        found.append(
            {row["mesh"]: row["bytes"] for row in json.loads(capsys.readouterr().out)["choices"] if row["bytes"]}
        )
    for mesh, size in found[0].items():
        assert found[2][mesh] < size < found[1][mesh]


def test_a_chosen_dtype_is_that_of_all_bytes(capsys, config):
    args = ("llama", "--model", config(SMALL | {"dtype": "float32"}), "--world", "6", "--set", "tp=3", "--no-step")
    full, half = (report(capsys, *args, *more) for more in ((), ("--dtype", "bfloat16")))
    assert (full["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert half["memory"]["most"]["total"] * 2 == full["memory"]["most"]["total"]
