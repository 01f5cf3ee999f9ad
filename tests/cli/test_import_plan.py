"""``shardtensor import hf``: files in, a plan on stdout, faults told with their exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardtensor.cli.main import main
from shardtensor.plan.interop.hugging_face import plan_text_from_hf

PLAN = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


@pytest.fixture
def write(tmp_path):
    def write(what, name="plan.json"):
        path = tmp_path / name
        path.write_text(what if isinstance(what, str) else json.dumps(what))
        return str(path)

    return write


def test_a_plan_is_printed(write, capsys):
    assert main(["import", "hf", write(PLAN)]) == 0
    assert capsys.readouterr().out == plan_text_from_hf(PLAN)


def test_experts_and_heads(write, capsys):
    ep_plan = {"layers.*.mlp.experts.gate_up_proj": "grouped_gemm", "layers.*.mlp.experts": "ep_dispatch_experts"}
    attention = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    attention["layers.*.self_attn.o_proj"] = "rowwise"
    path = write({"tp_plan": attention, "ep_plan": ep_plan})
    config = write({"num_attention_heads": 4, "hidden_size": 64}, "config.json")
    assert main(["import", "hf", path, "--experts", "--config", config]) == 0
    out = capsys.readouterr().out
    rules = [line.split(":") for line in out.splitlines()]
    assert ["layers.*.self_attn.q_proj", "hf_colwise(tp, unit=hd)"] in [list(map(str.strip, rule)) for rule in rules]
    assert "gate_up_proj: [ep, -, -]\n" in out and "mesh (dp = world / (ep * tp), ep, tp)\ndata dp*ep\n" in out


def test_what_has_no_translation_is_status_1(write, capsys):
    path = write({"layers.*.mlp.gate": "ep_router"})
    assert main(["import", "hf", path]) == 1
    assert capsys.readouterr().err.startswith(
        f'{path}: 1 of 1 rules has no translation\n  layers.*.mlp.gate  "ep_router": the router of transformers 4.x'
    )


@pytest.mark.parametrize(
    ("what", "told"),
    [("{", "is no JSON"), ("[]", "holds no JSON object"), ({"a": 1}, "a rule is a pattern and a word, found 'a': 1")],
)
def test_what_cannot_be_read_is_status_2(write, capsys, what, told):
    assert main(["import", "hf", write(what)]) == 2
    assert told in capsys.readouterr().err


def test_a_missing_file_is_status_2(tmp_path, capsys):
    assert main(["import", "hf", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_configuration_needs_transformers(write, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["import", "hf", write({"model_type": "llama"}, "config.json")]) == 2
    assert "stands in transformers, which is not installed" in capsys.readouterr().err


def test_a_plan_is_read_without_torch(write):
    program = f"import sys; from shardtensor.cli.main import main; main(['import', 'hf', {write(PLAN)!r}])"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; assert 'torch' not in sys.modules"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


class GatedForCausalLM(nn.Module):
    """Of a made-up family, as transformers has them: made of a configuration, with a plan."""

    tp_plan = {"mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}

    def __init__(self, config):
        super().__init__()
        up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.mlp = nn.ModuleDict({"up_proj": up_proj, "down_proj": down_proj})
        self.norm = nn.LayerNorm(config.hidden_size)


GATED = {
    "model_type": "gated", "architectures": ["GatedForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def transformers(monkeypatch):
    """What the commands need of transformers; it knows one model."""

    def for_model(model_type, **keys):
        if model_type != "gated":
            raise ValueError(f"Unrecognized model identifier: {model_type}")
        return SimpleNamespace(**keys)

    found = SimpleNamespace(GatedForCausalLM=GatedForCausalLM, AutoConfig=SimpleNamespace(for_model=for_model))
    monkeypatch.setitem(sys.modules, "transformers", found)


def _imported(write, capsys):
    """The paths of a config.json and of the plan that is printed for it."""
    config = write(GATED, "config.json")
    assert main(["import", "hf", config]) == 0
    return config, write(capsys.readouterr().out, "p.shard")


@pytest.mark.usefixtures("transformers")
def test_an_imported_plan_is_checked_against_the_config_that_it_came_from(write, capsys):
    config, plan = _imported(write, capsys)
    for command in ("check", "plan", "show"):
        assert main([command, plan, "--model", config, "--world", "2"]) == 0
        out = capsys.readouterr().out
        assert "up_proj" in out or command != "show"
        assert "the step is not counted: it does not run" in out or command != "plan", "the class has no forward"
        assert f"{2 * 16 * 32 + 32:,} parameters" in out or command == "show"
    assert main(["check", plan, "--model", config, "--world", "2", "--format", "json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["tensors"] == 4
    assert {share["layout"] for share in summary["layouts"]} == {"[tp, -]", "[-, tp]", "replicate"}


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"model_type": "unheard"}, "Unrecognized model identifier: unheard"),
        ({"quantization_config": {"bits": 4}}, "the tensors of a quantised model are not known from its config.json"),
    ],
)
def test_what_transformers_makes_no_model_of_is_refused(write, capsys, keys, told):
    _, plan = _imported(write, capsys)
    assert main(["check", plan, "--model", write(GATED | keys, "other.json"), "--world", "2"]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "--module package.module:function" in err


def test_an_imported_plan_says_that_it_needs_transformers(write, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    plan = write(plan_text_from_hf(PLAN), "p.shard")
    assert main(["check", plan, "--model", write(GATED, "config.json"), "--world", "2"]) == 2
    err = capsys.readouterr().err
    assert "nothing says which tensors the model has" in err
    assert "install transformers" in err


class Underived(nn.Module):
    """A model without a plan, as the commands make it; small enough to run as it is."""

    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        wide = config.width * config.times
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(config.width, wide), "down": nn.Linear(wide, config.width)})
            for _ in range(2)
        )

    @classmethod
    def _from_config(cls, config, **options):
        return cls(config)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer["down"](torch.softmax(layer["up"](x), -1) if self.config.mixes else layer["up"](x).relu())
        return x


class UnderivedConfig(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))

    def get_text_config(self):
        return self


def derived(monkeypatch, write, mixes):
    config = {"model_type": "underived", "architectures": ["Underived"], "vocab_size": 8, "width": 4, "times": 2}
    auto = SimpleNamespace(for_model=lambda **keys: UnderivedConfig(**keys))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Underived=Underived, AutoConfig=auto))
    return write(config | {"mixes": mixes}, "config.json")


def test_a_plan_is_derived_from_the_modules_where_there_is_none(write, capsys, monkeypatch):
    config = derived(monkeypatch, write, mixes=False)
    assert main(["import", "hf", config]) == 0
    out = capsys.readouterr().out
    assert "layers.*.up:   colwise(tp)\nlayers.*.down: rowwise(tp)\n" in out
    assert main(["check", write(out, "p.shard"), "--model", config, "--world", "2"]) == 0


def test_a_part_that_would_be_wrong_stays_whole_and_is_named(write, capsys, monkeypatch):
    config = derived(monkeypatch, write, mixes=True)  # a softmax over what would be sharded
    assert main(["import", "hf", config]) == 0
    out, err = capsys.readouterr()
    assert "layers.*" not in out and "embedding: vocab_embedding" in out
    assert "layers.* is not sharded: " in err


def test_a_plan_of_the_package_for_the_model_is_named(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4, architectures=["MambaForCausalLM"]
    )
    (tmp_path / "config.json").write_text(config.to_json_string())
    assert main(["import", "hf", str(tmp_path / "config.json")]) == 0
    assert "the package has a plan for such models, too: `mamba`" in capsys.readouterr().err
