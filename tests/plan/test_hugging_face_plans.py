"""Hugging Face's tensor-parallel plans: each word is translated to what it means there, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtensor import PlanError, parse_spec, plan_from_hf
from shardtensor.layout.bind import bind
from shardtensor.mesh import Mesh
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.interop.hugging_face import EP_WORDS, TP_WORDS, plan_text_from_hf
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo
from shardtensor.plan.text.formatting import format_plan
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.diagnostics import Source

RECORDED = json.loads((Path(__file__).parent / "hugging_face_plans.json").read_text())
"""Every plan that stands in transformers 5.24, with the models that have it."""

REGISTERED = """
    embedding_rowwise embedding_colwise colwise_gather_output colwise_rep colwise rowwise rowwise_split_input
    rowwise_rep packed_colwise packed_rowwise sequence_parallel replicated_with_grad_allreduce mla_kv_a_proj all_reduce
    moe_tp_experts moe_identity_expert local_params replicate grouped_gemm ep_dispatch_experts
""".split()
"""Every style that transformers 5.24 registers."""


def test_every_registered_word_is_known():
    assert set(REGISTERED) == {
        word for words in (TP_WORDS, EP_WORDS) for word, said in words.items() if said.no_translation is None
    }
    assert {word for row in RECORDED for plan in ("tp", "ep") for word in row.get(plan, {}).values()} <= set(REGISTERED)


@pytest.mark.parametrize("with_experts", [False, True], ids=["tp", "tp and ep"])
@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["of"][0])
def test_recorded_plans_are_translated_or_refused_rule_by_rule(row, with_experts):
    tp, ep = row.get("tp", {}), row.get("ep", {}) if with_experts else {}
    layers = [pattern for pattern, word in ep.items() if word in ("colwise", "rowwise")]
    if layers:  # cut over ranks that see other samples: the one thing that has no translation
        with pytest.raises(PlanError) as caught:
            plan_text_from_hf(tp, ep)
        refused = str(caught.value).splitlines()[1:]
        assert [line.split()[0] for line in refused] == layers
        assert all("ranks along `ep` see different samples" in line for line in refused)
        ep = {pattern: word for pattern, word in ep.items() if pattern not in layers}
    text = plan_text_from_hf(tp, ep)
    assert format_plan(Source(text)) == text, "it is canonical"
    config = {"num_experts_per_tok": 2, "qk_rope_head_dim": 64}
    plan = read_plan(text, config=config, world=8, params={"tp": 2})
    assert plan.axes.size("tp") == 2 and not plan.findings
    told = _told(text)
    for pattern, word in _in_force(tp, ep).items():
        assert told.pop(pattern), f"{pattern} is lost"
        if word == "mla_kv_a_proj":
            owner = pattern.rpartition(".")[0]
            for beside in ("q_a_proj", "q_a_layernorm", "kv_a_layernorm"):
                assert told.pop(f"{owner}.{beside}") == ["hf_whole()"]
    assert not told, "nothing else is said"


def _in_force(tp: dict[str, str], ep: dict[str, str]) -> dict[str, str]:
    """The rules that count: where the plan of experts speaks of a module, the other plan does not."""
    kept = {p: w for p, w in tp.items() if not any(p == name or p.startswith(f"{name}.") for name in ep)}
    return kept | ep


def _told(text: str) -> dict[str, list[str]]:
    """The rules of a plan made here, by full patterns with braces spread out. Written to be simple, not complete."""
    told: dict[str, list[str]] = {}
    above: list[str] = []
    for line in text.split("\n\n", 1)[1].splitlines():
        line = line.strip()
        if line.startswith("use "):
            told.setdefault(".".join(above), []).append(line)
        elif line.endswith("{"):
            above.append(line.split()[0])
        elif line == "}":
            above.pop()
        elif not line.startswith("unmatched"):
            name, _, rule = (part.strip() for part in line.partition(": "))
            name = name.removeprefix("optional ")
            names = [name]
            if name.startswith("{"):
                listed, _, end = name[1:].partition("}")
                names = [f"{each}{end}" for each in listed.split(",")]
            for each in names:
                told.setdefault(".".join([*above, each]), []).append(rule)
    return told


SHARDED_DIM = {
    # what transformers' classes do to one tensor: the dim they shard, and into how many packed parts it falls
    "colwise": lambda ndim: (max(ndim - 2, 0), 1),
    "rowwise": lambda ndim: (ndim - 1, 1),
    "packed_colwise": lambda ndim: (max(ndim - 2, 0), 2 if ndim > 1 else 1),
    "packed_rowwise": lambda ndim: (ndim - 1, 2) if ndim > 1 else None,
    "grouped_gemm": lambda ndim: (0, 1),
    "replicate": lambda ndim: None,
}


@pytest.mark.parametrize("word", SHARDED_DIM)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_tensors_are_cut_where_transformers_shards_them(word, ndim):
    axis = "ep" if word == "grouped_gemm" else "tp"
    words = EP_WORDS if word == "grouped_gemm" else TP_WORDS
    shape, mesh = (8, 12, 16)[:ndim], Mesh(((axis, 2),))
    layout = bind(parse_spec(words[word].tensor(ndim)), shape, mesh)
    found = SHARDED_DIM[word](ndim)
    for rank in range(2):
        held = set()
        for box in layout.boxes(rank):
            dim = found[0] if found else 0
            held |= set(range(box.offsets[dim], box.offsets[dim] + box.sizes[dim]))
        if found is None:
            assert held == set(range(shape[0]))
            continue
        dim, parts = found
        part = shape[dim] // parts
        assert held == {
            start + i for start in range(0, shape[dim], part) for i in range(rank * part // 2, (rank + 1) * part // 2)
        }


def test_refusals_name_each_rule_and_the_reason():
    with pytest.raises(PlanError) as caught:
        plan_text_from_hf(
            {"layers.*.mlp.gate": "ep_router", "layers.*.mlp.up": "colwize", "layers.*.mlp.experts": "grouped_gemm"},
            {"layers.*.attn.q": "colwise"},
        )
    assert str(caught.value) == (
        "4 of 4 rules have no translation\n"
        '  layers.*.mlp.gate     "ep_router": the router of transformers 4.x masks what goes to other ranks, which no '
        'layout says; take the rule out, and write "ep_dispatch_experts" for the experts and "grouped_gemm" for their '
        "tensors in the ep_plan\n"
        '  layers.*.mlp.up       "colwize": no word of this name is known; did you mean "colwise"?\n'
        '  layers.*.mlp.experts  "grouped_gemm": it is a word of the ep_plan\n'
        '  layers.*.attn.q       "colwise": ranks along `ep` see different samples, so a layer cannot be cut over '
        "them; take the rule out of the ep_plan; the same rule may stand in the tp_plan"
    )


LLAMA = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def test_the_text_reads_like_one_written_by_hand():
    full = {
        "model.embed_tokens": "embedding_rowwise",
        **{f"model.{pattern}": word for pattern, word in LLAMA.items()},
        "lm_head": "colwise_gather_output",
    }
    config = {"hidden_size": 64, "num_attention_heads": 8}
    assert plan_text_from_hf(full, config=config) == (
        "shard 1\n"
        "# made of a Hugging Face tensor-parallel plan of 9 rules\n"
        'include "std/hugging_face.shard"\n'
        "param tp = world\n"
        "let hd = config.head_dim ?? config.hidden_size / config.num_attention_heads\n"
        "mesh (dp = world / tp, tp)\n"
        "data dp\n"
        "\n"
        "model.embed_tokens:              hf_embedding_rowwise(tp)\n"
        "model.layers.*.self_attn.q_proj: hf_colwise(tp, unit=hd)\n"
        "model.layers.*.self_attn.k_proj: hf_colwise(tp, unit=hd)\n"
        "model.layers.*.self_attn.v_proj: hf_colwise(tp, unit=hd)\n"
        "model.layers.*.self_attn.o_proj: hf_rowwise(tp, unit=hd)\n"
        "model.layers.*.mlp.gate_proj:    hf_colwise(tp)\n"
        "model.layers.*.mlp.up_proj:      hf_colwise(tp)\n"
        "model.layers.*.mlp.down_proj:    hf_rowwise(tp)\n"
        "lm_head:                         hf_colwise_gather_output(tp)\n"
        "unmatched: replicate\n"
    )


def test_a_model_tells_tensors_from_modules():
    plan = {"layers.*.experts.odd": "rowwise", "layers.*.experts": "moe_tp_experts"}
    assert "odd: hf_rowwise(tp)" in plan_text_from_hf({"layers.*.experts.odd": "rowwise"})
    alone = ModuleInfo("Experts", ("hidden_states",))
    model = Model((TensorInfo("layers.0.experts.odd", (4, 6)),), modules={"layers.0.experts": alone})
    text = plan_text_from_hf(plan, model=model)
    assert "odd: [-, tp]" in text
    assert "hf_moe_tp_experts_without_weights(tp)" in text, "these experts take no routing weights"


def test_a_tensor_is_local_to_its_modules_forward_with_and_without_the_word_for_it():
    plan = {"layers.*.attn.q_proj": "colwise", "layers.*.attn.sinks": "colwise"}
    shapes = (TensorInfo("layers.0.attn.q_proj.weight", (8, 8)), TensorInfo("layers.0.attn.sinks", (8,)))
    model = Model(shapes, modules={path: ModuleInfo("M", ()) for path in ("layers.0.attn", "layers.0.attn.q_proj")})
    with_the_word = plan_text_from_hf(plan | {"layers.*.attn": "local_params"}, model=model)
    without = plan_text_from_hf(plan, model=model)
    assert without == with_the_word.replace("of 3 rules", "of 2 rules")
    assert "hf_local_params()" in without


def test_a_plan_of_llama_is_right_and_refuses_to_cut_a_head():
    config = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1000,
    }  # fmt: skip
    full = {
        "model.embed_tokens": "embedding_rowwise",
        **{f"model.{pattern}": word for pattern, word in LLAMA.items()},
        "lm_head": "colwise_gather_output",
    }
    model = model_from_dims(read_plan("llama", config=config, world=4, params={"tp": 4}))
    found = check_plan(resolve(plan_from_hf(full, config=config, world=4), model))
    assert [finding.code for finding in found if finding.severity == "error"] == []
    found = check_plan(resolve(plan_from_hf(full, config=config, world=8), model))
    assert {finding.code for finding in found if finding.severity == "error"} == {"E205"}, "4 key heads on 8 ranks"
