"""Seeded mutations of shipped plans: each is refused at the line that is wrong, or marked for the numeric check.

What text alone cannot tell, for the model's own code says it, is marked ``NUMERIC``: the same list serves
``shardtensor check --numeric``, which runs a step of a tiny model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

import shardtensor
from shardtensor.errors import SpecError
from shardtensor.plan.flows.gradients import check_flows
from shardtensor.plan.loading import read_config
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.diagnostics import Source

SPECS = Path(shardtensor.__file__).parent.parent / "specs"
MODELS = Path(__file__).parent / "models"
NUMERIC = "numeric"
LOUD = "loud"
"""Not told by text, and not silent either: the first step has operands that do not fit, and raises."""


@attrs.frozen
class Mutation:
    """A change of a plan's text: what it was and becomes, the code that refuses it, and what stands on that line."""

    was: str
    becomes: str
    code: str
    at: str = ""
    plan: str = "llama"
    model: str = "llama3-8b"
    world: int = 8
    params: dict[str, Any] = attrs.field(factory=dict)


SP = {"sp": True}
WIDE = {"world": 16, "params": {"tp": 16}}
OUT = "o_proj:     rowwise(tp, unit=hd, to=stream)"
KV = "{k,v}_proj: colwise_shared(kvg, copies=kvr, unit=hd)"
GATE, DOWN = "{gate,up}_proj: colwise(tp)", "down_proj:      rowwise(tp, to=stream)"
NORMS = "{input,post_attention}_layernorm: along(stream)"


GPT2 = {"plan": "gpt2", "model": "gpt2", "world": 4}
BERT = {"plan": "bert", "model": "minilm", "world": 4}
T5 = {"plan": "t5", "model": "t5-small", "world": 4}
MIXTRAL = {"plan": "mixtral", "model": "mixtral-8x7b"}


def block(name: str, *entries: str) -> str:
    return "\n".join([f"{name} {{", *entries, "}"])


def column(name: str, axis: str = "tp", unit: str = "", **entries: str) -> str:
    cut = f"{axis} unit({unit})" if unit else axis
    said = {"weight": f"[out: {cut}]", "out": f"[..., {cut}]"} | entries
    return block(name, *(f"{key}: {value}" for key, value in said.items()))


def row(name: str, **entries: str) -> str:
    said = {"weight": "[in: tp]", "in": "[..., tp]", "out": "partial(tp) -> replicate"} | entries
    return block(name, *(f"{key}: {value}" for key, value in said.items()))


MUTATIONS = {
    # -- sums of values
    "an all-reduce is dropped": Mutation(OUT, row("o_proj", out="partial(tp)"), "E404", "out: partial(tp)"),
    "an all-reduce is not said": Mutation(OUT, row("o_proj", out="replicate"), "E402", "out: replicate"),
    "a sum is made twice": Mutation(
        GATE, f"out: partial(tp) -> replicate\n{GATE}", "E403", "out: partial(tp) -> replicate"
    ),
    "rows of other ranks are not summed": Mutation(
        "embed_tokens: vocab_embedding(tp, pad=64)",
        block("embed_tokens", "weight: [vocab: tp pad(64)]", "out: replicate"),
        "E402",
        "out: replicate",
    ),
    "experts are not summed": Mutation(
        "out: partial(tp) -> replicate",
        "out: partial(tp)",
        "E404",
        "out: partial(tp)",
        "mixtral",
        "mixtral-8x7b",
    ),
    # -- biases
    "a bias is cut beside a sum": Mutation(
        "c_proj: rowwise(tp, unit=hd)",
        row("c_proj", bias="[out: tp]"),
        "E402",
        "bias: [out: tp]",
        "gpt2",
        "gpt2",
        4,
    ),
    "a bias is whole beside blocks": Mutation(
        "c_attn: colwise(tp, unit=hd, blocks=3)",
        column("c_attn", "tp blocks(3)", bias="replicate"),
        "E402",
        "bias: replicate",
        "gpt2",
        "gpt2",
        4,
    ),
    # -- gradients
    "copies of keys are not summed": Mutation(KV, "{k,v}_proj: colwise(kvg, unit=hd)", "E401", "colwise(kvg", **WIDE),
    "copies are along the wrong factor": Mutation("copies=kvr", "copies=kvg", "E401", "copies=kvg", **WIDE),
    "a product is cut by a factor alone": Mutation(
        GATE, "gate_proj: colwise(tp)\nup_proj: colwise(kvg)", "E401", "up_proj: colwise(kvg)", **WIDE
    ),
    "an in around and again inside": Mutation(
        "q_proj:     colwise(tp, unit=hd)", column("q_proj", unit="hd", **{"in": "replicate"}), "E401", "in: replicate"
    ),
    "keys stay whole beside cut queries": Mutation(KV, "{k,v}_proj: replicate", "E401", "{k,v}_proj: replicate"),
    "an in around a residual": Mutation(
        "    attention.self {\n        in: replicate",
        "attention {\n in: replicate\n}\n attention.self {",
        "E401",
        "**.LayerNorm",
        "bert",
        "minilm",
        4,
    ),
    # -- streams
    "norms of a stream are forgotten": Mutation(
        NORMS, NORMS.replace("along(stream)", "replicate"), "E401", "{input,", params=SP
    ),
    "norms of a stream take copies": Mutation(
        NORMS, NORMS.replace("stream", "replicate"), "E403", "along(replicate)", params=SP
    ),
    "the last norm of a stream is forgotten": Mutation(
        "    norm: along(stream)", "    norm: replicate", "E401", "norm: replicate", params=SP
    ),
    "a stream is not gathered": Mutation(
        f"in: stream -> replicate\n            {GATE}", GATE, "E401", "in: replicate -> stream", params=SP
    ),
    "a stream enters products as it is": Mutation(
        f"in: stream -> replicate\n            {GATE}", f"in: stream\n{GATE}", LOUD, "", params=SP
    ),
    "a sum is not dealt out": Mutation(OUT, "o_proj: rowwise(tp, unit=hd)", LOUD, "", params=SP),
    "the head does not gather": Mutation("from=stream", "from=replicate", LOUD, "", params=SP),
    "a head multiplies a stream": Mutation(
        "lm_head: vocab_head(tp, pad=64, from=stream)",
        column("lm_head", "tp pad(64)", **{"in": "stream"}),
        "E402",
        "in: stream",
        params=SP,
    ),
    # -- who gives and who takes
    "inputs of a row product stay whole": Mutation(GATE, "{gate,up}_proj: replicate", LOUD, ""),
    "inputs of a row product are gathered": Mutation(
        GATE, column("{gate,up}_proj", out="[..., tp] -> replicate"), LOUD, ""
    ),
    "a row product is cut along its outputs": Mutation(DOWN, "down_proj: colwise(tp)", LOUD, ""),
    "the wrong dim is cut": Mutation(OUT, row("o_proj", weight="[out: tp]"), "E402", "in: [..., tp]"),
    "a row product stays whole": Mutation(DOWN, "down_proj: replicate", "E401", "down_proj: replicate"),
    "logits leave cut, and no loss takes them": Mutation("use cross_entropy()\n", "", LOUD, ""),
    "attention ends in a column product": Mutation(OUT, "o_proj: colwise(tp, unit=hd)", LOUD, ""),
    "attention ends in a column product, beside a stream": Mutation(
        OUT, "o_proj: colwise(tp, unit=hd)", LOUD, "", params=SP
    ),
    "attention of GPT-2 ends in a column product": Mutation(
        "c_proj: rowwise(tp, unit=hd)", "c_proj: colwise(tp, unit=hd)", LOUD, "", **GPT2
    ),
    "attention of T5 ends in a column product": Mutation(
        "o:       rowwise(tp, unit=dkv)", "o: colwise(tp)", LOUD, "", **T5
    ),
    "attention of experts' layers ends in a column product": Mutation(
        "o_proj:       rowwise(tp, unit=hd)", "o_proj: colwise(tp, unit=hd)", "E403", "o_proj: colwise(", **MIXTRAL
    ),
    "the mlp of GPT-2 begins with a row product": Mutation(
        "mlp.c_fc:   colwise(tp)", "mlp.c_fc: rowwise(tp)", LOUD, "", **GPT2
    ),
    "the mlp of GPT-2 begins whole": Mutation("mlp.c_fc:   colwise(tp)", "mlp.c_fc: replicate", LOUD, "", **GPT2),
    "the attention of GPT-2 begins whole": Mutation(
        "c_attn: colwise(tp, unit=hd, blocks=3) ", "c_attn: replicate ", LOUD, "", **GPT2
    ),
    "a row product leaves cut features": Mutation(OUT, row("o_proj", out="partial(tp) -> [..., tp]"), LOUD, ""),
    "a row product takes whole values": Mutation(OUT, row("o_proj", **{"in": "replicate -> [..., tp]"}), LOUD, ""),
    "only one product of two is cut": Mutation(
        "intermediate.dense:     colwise(tp)", "intermediate.dense: replicate", LOUD, "", **BERT
    ),
    "a table is cut by features": Mutation(
        "embed_tokens: vocab_embedding(tp, pad=64)",
        block("embed_tokens", "weight: [embed: tp]", "out: [..., tp]"),
        LOUD,
        "",
    ),
    "the head is a row product": Mutation(
        "lm_head: vocab_head(tp, pad=64, from=stream)", "lm_head: rowwise(tp)", "E403", "use cross_entropy()"
    ),
    "a loss has no cut head": Mutation(
        "optional lm_head: vocab_head(tp, pad=64)", "optional lm_head: replicate", "E403", "use cross_entropy()", **GPT2
    ),
    "the last norm takes copies": Mutation(
        "    norm: along(stream)", "    norm: along(replicate)", "E403", "norm: along(replicate)", params=SP
    ),
    "a sum is dealt out along another dim": Mutation(OUT, OUT.replace("stream", "[tp, ...]"), LOUD, "", params=SP),
    "a stream is gathered along another dim": Mutation(
        "in: stream -> replicate\n            q_proj",
        "in: [tp, ...] -> replicate\n            q_proj",
        LOUD,
        "",
        params=SP,
    ),
    "the attention does not say how values enter": Mutation(
        "in: stream -> replicate\n            q_proj", "q_proj", "E401", "in: replicate -> stream"
    ),
    "norms are cut among plain values": Mutation("ln_{1,2}: replicate", "ln_{1,2}: [tp]", LOUD, "", **GPT2),
    "a table of positions passes a ShardedTensor": Mutation("                out: [..., tp]\n", "", LOUD, "", **T5),
    # -- what follows from weights, and what meets it
    "a head says what enters it and not what leaves": Mutation(
        "lm_head: vocab_head(tp, pad=64, from=stream)\nuse cross_entropy()",
        block("lm_head", "weight: [out: tp pad(64)]", "in: replicate"),
        LOUD,
        "",
    ),
    "an in sums copies": Mutation(
        "mlp {\n            in: stream -> replicate",
        "mlp {\n            in: partial(tp) -> replicate",
        "E403",
        "in: partial",
    ),
    "the last norm cuts what comes cut": Mutation(
        "    norm: along(stream)\n    layers.0",
        block("    norm", "weight: replicate", "in: replicate -> stream", "out: stream") + "\n    layers.0",
        "E403",
        "in: replicate -> stream",
        params=SP,
    ),
    "the last norm gathers what the head gathers": Mutation(
        "    norm: along(stream)\n    layers.0",
        block("    norm", "weight: replicate", "in: stream", "out: stream -> replicate") + "\n    layers.0",
        LOUD,
        "",
        params=SP,
    ),
    "a cut table beside a stream": Mutation(
        "embed_tokens: vocab_embedding(tp, pad=64)",
        "embed_tokens.weight: [vocab: tp pad(64)]",
        "E403",
        "embed_tokens",
        params=SP,
    ),
    # -- experts
    "routing weights meet partial sums": Mutation(
        "in top_k_weights: replicate grad partial(tp)", "# no weights", "E401", "gate_up_proj:", **MIXTRAL
    ),
    "tokens of experts meet partial sums": Mutation(
        "in:               replicate grad partial(tp)", "in: replicate", "E401", "in: replicate", **MIXTRAL
    ),
    "experts do not say what leaves them": Mutation(
        "out: partial(tp) -> replicate", "", "E402", "gate_up_proj:", **MIXTRAL
    ),
    "experts leave copies": Mutation(
        "out: partial(tp) -> replicate", "out: replicate", "E402", "out: replicate", **MIXTRAL
    ),
    "no token is sent to experts": Mutation(
        "use dispatch(ep, top_k=config.num_experts_per_tok)\n            out", "out", "E403", "gate_up_proj:", **MIXTRAL
    ),
    "experts are dealt along ranks with the same samples": Mutation(
        "data dp*ep", "data dp", "E401", "use dispatch(", **MIXTRAL
    ),
    # -- layouts
    "a head is cut in half": Mutation(
        "{k,v}_proj: colwise_shared(kvg,", "{k,v}_proj: colwise_shared(tp,", "E205", "colwise_shared(tp,", **WIDE
    ),
    "an axis factor does not fit": Mutation("kvr = tp / kvg", "kvr = tp", "E105", "mesh", **WIDE),
    "a flow names the data": Mutation(
        "in: replicate\n            {q,k,v}",
        "in: partial(ep) -> replicate\n            {q,k,v}",
        "E204",
        "partial(ep)",
        "mixtral",
        "mixtral-8x7b",
    ),
    "two rules disagree": Mutation(GATE, "*_proj: colwise(tp)", "E302", ""),
    "a rule is missing": Mutation(GATE, "gate_proj: colwise(tp)", "E301", ""),
    "fused blocks are cut as one": Mutation(
        "colwise(tp, unit=hd, blocks=3)", "colwise(tp, unit=hd)", "E206", "c_attn: colwise(tp, unit=hd)", **GPT2
    ),
    "the bias of fused blocks is cut as one": Mutation(
        "c_attn: colwise(tp, unit=hd, blocks=3)",
        column("c_attn", "tp blocks(3)", bias="[out: tp]"),
        "E206",
        "bias: [out: tp]",
        **GPT2,
    ),
    "gate and up of experts are cut as one": Mutation(
        "[ep, tp blocks(2), -]", "[ep, tp, -]", "E206", "[ep, tp, -]", **MIXTRAL
    ),
    # -- what text does not say
    "the second input is not named": Mutation(
        "in key_value_states: replicate", "# no second input", NUMERIC, "", "t5", "t5-small", 4
    ),
    "the first layer deals nothing out": Mutation("in: replicate -> stream", "in: replicate", NUMERIC, "", params=SP),
    "an attribute that counts heads is not said": Mutation(
        "local num_attention_heads: [tp] if fits else replicate", "", LOUD, "", "bert", "minilm", 4
    ),
    "a whole product beside cut ones": Mutation(
        "attention.output.dense: rowwise(tp, unit=hd) if fits else replicate",
        "attention.output.dense: replicate",
        LOUD,
        "",
        "bert",
        "minilm",
        4,
    ),
    "a product before another is cut along its inputs": Mutation(
        GATE, "gate_proj: colwise(tp)\nup_proj: rowwise(tp)", LOUD
    ),
}


def findings_of(mutation: Mutation, text: str):
    config, source = read_config(MODELS / mutation.model / "config.json")
    said = {"config": config, "world": mutation.world, "params": mutation.params, "config_source": source}
    model = model_from_dims(read_plan(mutation.plan, **said), source)
    try:
        resolved = resolve(read_plan(Source(text, f"{mutation.plan}.shard"), **said), model)
    except SpecError as error:
        return error.findings
    return resolved.errors or check_flows(resolved)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_refused_at_its_line(name):
    mutation = MUTATIONS[name]
    text = (SPECS / f"{mutation.plan}.shard").read_text()
    assert mutation.was in text, "the mutation has something to change"
    found = findings_of(mutation, text.replace(mutation.was, mutation.becomes, 1))
    if mutation.code in (NUMERIC, LOUD):
        assert not found, "text tells it: mark it so"
        return
    lines = [finding.origin.source.text.splitlines()[finding.origin.line - 1] for finding in found if finding.origin]
    assert mutation.code in {finding.code for finding in found}
    assert any(mutation.at in line for line in lines), lines


def test_the_plans_themselves_are_told_nothing():
    for plan, model, world, params in {(m.plan, m.model, m.world, tuple(m.params.items())) for m in MUTATIONS.values()}:
        mutation = Mutation("", "", "", "", plan, model, world, dict(params))
        assert not findings_of(mutation, (SPECS / f"{plan}.shard").read_text())
