"""``shardtensor import hf``: files in, a plan on stdout, faults told with their exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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


def test_prefix_experts_and_heads(write, capsys):
    ep_plan = {"layers.*.mlp.experts.gate_up_proj": "grouped_gemm", "layers.*.mlp.experts": "ep_dispatch_experts"}
    attention = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    attention["layers.*.self_attn.o_proj"] = "rowwise"
    path = write({"tp_plan": attention, "ep_plan": ep_plan})
    config = write({"num_attention_heads": 4, "hidden_size": 64}, "config.json")
    assert main(["import", "hf", path, "--prefix", "model", "--experts", "--config", config]) == 0
    out = capsys.readouterr().out
    assert "model.layers.* {\n" in out and "{q,k,v}_proj: hf_colwise(tp, unit=hd)\n" in out
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
