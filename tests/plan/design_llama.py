"""The Llama plan of the language's design, its tensors, and plans that differ from it in a line."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.findings.report import folded, text_report
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo
from shardtensor.plan.resolved import Resolved
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.diagnostics import Source

CONFIG = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

TEXT = """\
shard 1
# Llama 2/3, Mistral, Qwen2: dense decoders, Hugging Face names
include "std/styles.shard"

param tp = 8
param sp = false                                # sequence parallel between the products
let heads = config.num_attention_heads
let kv    = config.num_key_value_heads ?? heads
let hd    = config.head_dim ?? config.hidden_size / heads

mesh (dp = world / tp, tp (kvg = gcd(tp, kv), kvr = tp / kvg))    # tp=16, kv=8: kvg=8, kvr=2
data dp
require heads % tp == 0 "every rank needs whole query heads"
require kv % tp == 0 or tp % kv == 0 "kv heads must divide tp, or tp must divide kv heads"
let stream = [-, tp, ...] if sp else replicate  # (batch, seq, embed) from layer to layer

model {
    embed_tokens: vocab_embedding(tp, pad=64, to=stream)
    layers.* {
        {input,post_attention}_layernorm: along(stream)
        self_attn {
            in: stream -> replicate
            q_proj:     colwise(tp, unit=hd)
            {k,v}_proj: colwise_shared(kvg, copies=kvr, unit=hd)
            o_proj:     rowwise(tp, unit=hd, to=stream)
            local num_key_value_groups: [kvr]   # query heads to each kv head, on one rank
        }
        mlp {
            in: stream -> replicate
            {gate,up}_proj: colwise(tp)
            down_proj:      rowwise(tp, to=stream)
        }
    }
    norm: along(stream)
}
tie lm_head.weight = model.embed_tokens.weight if config.tie_word_embeddings ?? false
lm_head: vocab_head(tp, pad=64, from=stream)
use cross_entropy()
"""


@cache
def model(layers: int = 32) -> Model:
    """The tensors of Llama-3-8B."""
    hidden, inner, vocab, shared = 4096, 14336, 128256, 1024
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (shared, hidden),
        "self_attn.v_proj": (shared, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = [TensorInfo("model.embed_tokens.weight", (vocab, hidden), ("vocab", "embed"), "bfloat16")]
    for i in range(layers):
        path = f"model.layers.{i}"
        found += [TensorInfo(f"{path}.{n}.weight", shape, ("out", "in"), "bfloat16") for n, shape in sizes.items()]
        norms = ("input_layernorm", "post_attention_layernorm")
        found += [TensorInfo(f"{path}.{n}.weight", (hidden,), ("embed",), "bfloat16") for n in norms]
    found.append(TensorInfo("model.norm.weight", (hidden,), ("embed",), "bfloat16"))
    found.append(TensorInfo("lm_head.weight", (vocab, hidden), ("out", "in"), "bfloat16"))
    return Model(tuple(found), "config.json", config=CONFIG)


def with_modules(counts: dict[str, int], arguments: tuple[str, ...] = ("hidden_states", "attention_mask")) -> Model:
    """The same tensors, as a real module tells them; `counts` are the attributes of its attention."""
    plain = model()
    modules = {path: ModuleInfo("LlamaModule", arguments) for path in plain.paths}
    attention = [path for path in plain.paths if path.endswith("self_attn")]
    modules |= {path: ModuleInfo("LlamaAttention", arguments, counts) for path in attention}
    return Model(plain.tensors, "the module", modules, config=CONFIG)


def resolved(*changes: tuple[str, str], world: int = 8, of: Model | None = None, **params: Any) -> Resolved:
    """The plan with each of `changes` made once, resolved."""
    text = TEXT
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the plan"
        text = text.replace(old, new)
    read = read_plan(Source(text, "specs/llama.shard"), config=CONFIG, world=world, params=params)
    return resolve(read, of or model())


def report(*changes: tuple[str, str], **options: Any) -> str:
    """What `check` says of the plan with `changes`, but for the note that `sp` is false."""
    findings = (each for each in check_plan(resolved(*changes, **options)) if each.code != "N001")
    return text_report(folded(findings))
