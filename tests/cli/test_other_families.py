"""What a plan's own lines say of tensors holds for its family alone: of other models the commands refuse to speak."""

from __future__ import annotations

import json
import sys

import pytest
from public_configs import COVERED, LLAMA3_8B, MISTRAL_7B, OTHERS, QWEN2_7B

from shardtensor.cli.main import main
from shardtensor.plan.loading import load_plan
from shardtensor.plan.models.dims import model_from_dims

FAMILY = {
    "llama": "these are the tensors of Llama 2 and 3, Mistral and Qwen2",
    "llama_2d": "these are the tensors of Llama 2 and 3, Mistral and Qwen2",
    "fsdp": "these are the tensors of Llama 2 and 3, Mistral and Qwen2",
    "mixtral": "these are the tensors of MixtralForCausalLM",
    "gpt2": "these are the tensors of GPT2LMHeadModel",
    "t5": "these are the tensors of T5ForConditionalGeneration",
    "bert": "these are the tensors of BertModel",
    "vit": "these are the tensors of ViTModel",
    "mlp": "this is a small example",
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(keys):
        (tmp_path / "config.json").write_text(json.dumps(keys))
        return "config.json"

    return write


@pytest.mark.parametrize("plan", FAMILY)
@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_family_is_refused_in_one_error(config, capsys, plan, name):
    keys = OTHERS[name]
    assert main(["check", plan, "--world", "8", "--model", config(keys)]) == 1
    out = capsys.readouterr().out
    assert out.count("error[") == 1
    assert FAMILY[plan] in out
    if keys["model_type"] not in ("llama",) or plan in ("bert", "vit", "mlp"):
        assert f"config.model_type is {keys['model_type']}" in out
    else:
        assert "config.architectures is LlamaForSequenceClassification" in out
    for way in ("`fsdp`", "--module", "--safetensors", "shardtensor import hf config.json"):
        assert way in out
    assert "parameters" not in out


@pytest.mark.parametrize("command", [["check", "--numeric"], ["plan"], ["plan", "--search"], ["show"]])
@pytest.mark.parametrize(
    ("plan", "name"), [("llama", "Qwen3-8B"), ("mixtral", "Qwen3-30B-A3B"), ("fsdp", "DeepSeek-V3")]
)
def test_every_command_refuses_it(config, capsys, command, plan, name):
    assert main([command[0], plan, *command[1:], "--world", "8", "--model", config(OTHERS[name])]) == 1
    said = "".join(capsys.readouterr())
    assert FAMILY[plan] in said
    assert f"config.model_type is {OTHERS[name]['model_type']}" in said


@pytest.mark.parametrize("name", COVERED)
def test_models_of_the_family_are_checked_and_the_verdict_says_what_was(config, capsys, name):
    plan = "mixtral" if name == "mixtral" else "llama"
    tp = "tp=2" if name == "mixtral" else "tp=4"
    assert main(["check", plan, "--world", "8", "--set", tp, "--no-step", "--model", config(COVERED[name])]) == 0
    out = capsys.readouterr().out
    assert "text and layouts checked; no step ran" in out
    assert "is right" not in out


def _names(keys):
    return set(model_from_dims(load_plan("llama", config=keys, world=1, tp=1)).by_name)


def test_biases_follow_from_the_class_where_no_key_says_them():
    plain = _names(LLAMA3_8B)
    assert len(plain) == 291
    assert len(_names(LLAMA3_8B | {"attention_bias": True})) == 291 + 4 * 32
    assert len(_names(LLAMA3_8B | {"mlp_bias": True})) == 291 + 3 * 32
    assert _names(MISTRAL_7B | {"attention_bias": True}) == plain  # a key that Mistral's class does not read
    assert len(_names(QWEN2_7B)) == 3 + 28 * 12


def test_a_gated_t5_is_told_by_its_activation_too():
    keys = {"model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 32}
    keys |= {"relative_attention_num_buckets": 4, "feed_forward_proj": "gated-gelu"}
    names = set(model_from_dims(load_plan("t5", config=keys, world=1)).by_name)
    assert "encoder.block.0.layer.1.DenseReluDense.wi_1.weight" in names
    plain = set(model_from_dims(load_plan("t5", config=keys | {"feed_forward_proj": "relu"}, world=1)).by_name)
    assert "encoder.block.0.layer.1.DenseReluDense.wi.weight" in plain


def test_a_quantised_model_is_refused(config, capsys):
    path = config(LLAMA3_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    assert main(["check", "llama", "--world", "8", "--model", path]) == 2
    err = capsys.readouterr().err
    assert "the tensors of a quantised model are not known from its config.json" in err
    assert "--safetensors" in err


MODULE = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm = nn.RMSNorm(8)
        self.q_proj = nn.Linear(16, 16)

def make():
    with torch.device("meta"):
        return nn.ModuleDict({"layers": nn.ModuleList([Attention()])})
"""


@pytest.mark.parametrize("command", ["check", "plan", "show"])
def test_the_way_on_by_a_module_of_the_working_folder(config, tmp_path, capsys, monkeypatch, command):
    path = config(OTHERS["Qwen3-8B"])
    (tmp_path / f"model_for_{command}.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    args = [command, "fsdp", "--world", "2", "--model", path, "--module", f"model_for_{command}:make"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert {"check": "3 tensors of ModuleDict, 280 parameters", "plan": "280 parameters", "show": "q_norm"}[
        command
    ] in out
