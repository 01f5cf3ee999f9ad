"""Findings about flows: shipped plans that are changed in one place, for models of two layers."""

from __future__ import annotations

from functools import partial

from plan.test_plan_mutations import GATE, KV, MODELS, MUTATIONS, SPECS, Mutation, column, row

from fixes.case import Case
from fixes.corrected import Found, of_findings, text_case
from shardtensor.errors import SpecError
from shardtensor.plan.flows.gradients import check_flows
from shardtensor.plan.loading import read_config
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.diagnostics import Source

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


def found_in(mutation: Mutation, text: str) -> list[Found]:
    """What is found in a plan for the model of a mutation."""
    config, source = read_config(MODELS / mutation.model / "config.json")
    config = {key: 2 if key in COUNTS and value else value for key, value in config.items()}
    said = {"config": config, "world": mutation.world, "params": mutation.params, "config_source": source}
    model = model_from_dims(read_plan(mutation.plan, **said), source)
    try:
        resolved = resolve(read_plan(Source(text, f"{mutation.plan}.shard"), **said), model)
    except SpecError as error:
        return of_findings(error.findings)
    return of_findings(resolved.errors or check_flows(resolved))


def mutated(name: str, becomes: str | None = None, **more: str) -> str:
    """The plan of a mutation; with other words in the place of what it changes, and in other places."""
    mutation = MUTATIONS[name]
    text = (SPECS / f"{mutation.plan}.shard").read_text()
    return text.replace(mutation.was, mutation.becomes if becomes is None else becomes, 1)


STREAM = "in: stream -> replicate\n            "
SAME = column("{k,v}_proj", "kvg", "hd", out="[..., kvg unit(hd)] grad replicate", **{"in": "replicate"})
# name of the mutation; words of the way out, and what then stands in the place of what it changes
WAYS: dict[str, dict[str, str]] = {
    "an all-reduce is dropped": {"write `partial(tp) -> replicate` (one all_reduce)": row("o_proj")},
    "an all-reduce is not said": {},
    "a sum is made twice": {"drop this `out`": GATE},
    "rows of other ranks are not summed": {},
    "a bias is cut beside a sum": {"keep the bias whole (`replicate`)": row("c_proj", bias="replicate")},
    "a bias is whole beside blocks": {
        "cut the bias in blocks, too": column("c_attn", "tp blocks(3)", bias="[out: tp blocks(3)]")
    },
    "copies of keys are not summed": {
        "`colwise_shared(kvg, copies=kvr, unit=hd)` sums over the copies": KV,
    },
    "copies are along the wrong factor": {"leave kvg out of `grad`": "copies=kvr"},
    "an in around and again inside": {
        "drop `in` here": "q_proj: colwise(tp, unit=hd)",
    },
    "keys stay whole beside cut queries": {
        "`along(replicate)` if they come whole": "{k,v}_proj: along(replicate)",
    },
    "the attention does not say how values enter": {
        "say how values enter `model.layers.0.self_attn`: `in: replicate` there": "in: replicate\n q_proj"
    },
    "an in around a residual": {"or move `in` to the modules that are cut": MUTATIONS["an in around a residual"].was},
    "norms of a stream are forgotten": {
        "write `along([-, tp, ...])` if values come cut so": "{input,post_attention}_layernorm: along([-, tp, ...])"
    },
    "norms of a stream take copies": {
        "take them as they come: `along([-, tp, ...])`": "{input,post_attention}_layernorm: along([-, tp, ...])"
    },
    "the last norm of a stream is forgotten": {
        "write `along([-, tp, ...])` if values come cut so": "    norm: along([-, tp, ...])"
    },
    "a head multiplies a stream": {
        "gather the input: `in: [-, tp, ...] -> replicate`": column(
            "lm_head", "tp pad(64)", **{"in": "[-, tp, ...] -> replicate"}
        )
    },
    "the head is a row product": {"cut the head, `vocab_head(tp)`": "lm_head: vocab_head(tp)"},
    "a loss has no cut head": {"cut the head, `vocab_head(tp)`": "optional lm_head: vocab_head(tp, pad=64)"},
    "the last norm cuts what comes cut": {
        "take them as they come: `along([-, tp, ...])`": "    norm: along([-, tp, ...])\n    layers.0"
    },
    "an in sums copies": {"drop `partial(tp)` here": "mlp {\n            in: replicate"},
    "a cut table beside a stream": {
        "or a style such as `colwise(...)` or `vocab_embedding(...)`": "embed_tokens: vocab_embedding(tp, pad=64)"
    },
    "routing weights meet partial sums": {
        "write `in top_k_weights: replicate grad partial(tp)`": "in top_k_weights: replicate grad partial(tp)"
    },
    "tokens of experts meet partial sums": {},
    "experts do not say what leaves them": {"write `out: partial(tp) -> replicate`": "out: partial(tp) -> replicate"},
    "experts leave copies": {},
    "no token is sent to experts": {
        "write `use dispatch(ep, top_k=...)`": "use dispatch(ep, top_k=2)\n            out",
    },
    "experts are dealt along ranks with the same samples": {"write `data dp*ep`": "data dp*ep"},
    "fused blocks are cut as one": {},
    "the bias of fused blocks is cut as one": {
        "write `blocks(3)` after `tp`": column("c_attn", "tp blocks(3)", bias="[out: tp blocks(3)]")
    },
}
SHARED = MUTATIONS["copies of keys are not summed"]
EACH = "write the flow with `grad replicate`, and move the `in` of model.layers.0.self_attn down to the layers in it"
CASES: dict[str, Case] = {
    "copies of keys that get the same gradient": text_case(
        partial(found_in, SHARED),
        mutated("copies of keys are not summed"),
        {
            EACH: mutated("copies of keys are not summed", SAME)
            .replace(STREAM, "", 1)
            .replace("q_proj:     colwise(tp, unit=hd)", column("q_proj", "tp", "hd", **{"in": "replicate"}))
        },
    )
} | {
    name: text_case(
        partial(found_in, MUTATIONS[name]),
        mutated(name),
        {words: mutated(name, becomes) for words, becomes in ways.items()},
        MUTATIONS[name].code,
    )
    for name, ways in WAYS.items()
}
