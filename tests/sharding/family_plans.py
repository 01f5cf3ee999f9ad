"""Plans for the families, made in Python, and what one training step of each is."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from families import (
    MLP,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    Uneven,
    ViTForImageClassification,
    Vocab,
    mixtral,
)
from torch import nn

import shardtensor as st
from shardtensor.plan.plan import Plan

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@attrs.frozen
class Family:
    """How to make a model and a batch of `n` samples, and what the loss is."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], torch.Tensor]
    loss: Loss


def _ids(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 21, (n, 4), generator=g)


def _few_ids(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 8, (n, 4), generator=g)


def _floats(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 3, 8, generator=g)


def _images(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, 3, 8, 8, generator=g)


def own_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model computes it."""
    return model(ids, labels=ids)["loss"]


def outer_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The caller computes it, of logits that may be cut."""
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


FAMILIES = {
    "mlp": Family(MLP, _floats, square),
    "llama": Family(LlamaForCausalLM, _ids, own_loss),
    "llama_bias": Family(lambda: LlamaForCausalLM(tied=True, bias=True), _ids, own_loss),
    "llama_even": Family(lambda: LlamaForCausalLM(tied=True, bias=True, vocab=32), _ids, own_loss),
    "gpt2": Family(GPT2LMHeadModel, _ids, outer_loss),
    "bert": Family(BertModel, _ids, square),
    "t5": Family(T5ForConditionalGeneration, _ids, outer_loss),
    "mixtral": Family(lambda: mixtral(stacked=False), _ids, own_loss),
    "mixtral_stacked": Family(lambda: mixtral(stacked=True), _ids, own_loss),
    "vit": Family(ViTForImageClassification, _images, square),
    "vocab": Family(Vocab, _ids, outer_loss),
    "uneven": Family(Uneven, _few_ids, square),
}


def colwise_shared(axis: str, copies: str, unit: int) -> dict[str, Any]:
    cut = f"{axis} unit({unit})"
    return {
        "weight": f"[out: {cut}]",
        "optional bias": f"[out: {cut}]",
        "out": f"[..., {cut}] grad partial({copies})",
    }


def column(axis: str, **options: Any) -> dict[str, Any]:
    return st.colwise(axis, **options)


def row(axis: str, **options: Any) -> dict[str, Any]:
    return {**st.rowwise(axis, **options), "optional bias": "replicate"}


def norm(stream: str) -> Any:
    return "replicate" if stream == "replicate" else {"**": "replicate", **st.along(stream)}


def mlp(world: int) -> Plan:
    rules = {
        "fc1": {"weight": "[tp, -]", "bias": "[tp]", "in": "replicate", "out": "[..., tp]"},
        "fc2": {"weight": "[-, tp]", "bias": "replicate", "in": "[..., tp]", "out": "partial(tp) -> replicate"},
    }
    return Plan.from_rules(rules, f"tp={world}")


def llama(world: int, tp: int = 4, sp: bool = False, store: str = "", tied: bool = False) -> Plan:
    kvg, hd = gcd(tp, 2), 4
    stream = "[-, tp, ...]" if sp else "replicate"
    enters = "[-, tp, ...] -> replicate" if sp else "replicate"
    rules: dict[str, Any] = {
        "model": {
            "embed_tokens": st.vocab_embedding("tp", pad=8, to=stream),
            "layers.*": {
                "{input,post_attention}_layernorm": norm(stream),
                "self_attn": {
                    "in": enters,
                    "q_proj": column("tp", unit=hd),
                    "{k,v}_proj": colwise_shared("kvg", "kvr", hd),
                    "o_proj": row("tp", unit=hd, to=stream),
                    "local num_key_value_groups": "[kvr]",
                },
                "mlp": {"in": enters, "{gate,up}_proj": column("tp"), "down_proj": row("tp", to=stream)},
            },
            "norm": norm(stream),
        },
        "lm_head": st.vocab_head("tp", pad=8, came=stream),
        "use": "cross_entropy()",
    }
    if tied:
        rules["tie lm_head.weight"] = "model.embed_tokens.weight"
    if store:
        rules["store **"] = store
    return Plan.from_rules(rules, f"dp={world // tp}, tp(kvg={kvg}, kvr={tp // kvg})", data="dp")


def gpt2(world: int) -> Plan:
    rules = {
        "transformer": {
            "wte": st.vocab_embedding("tp", pad=8),
            "wpe": "replicate",
            "h.*": {
                "ln_{1,2}": "replicate",
                "attn": {
                    "c_attn": column("tp", unit=4, blocks=3),
                    "c_proj": row("tp", unit=4),
                    "local num_heads": "[tp]",
                    "local split_size": "[tp unit(4)]",
                },
                "mlp.c_fc": column("tp"),
                "mlp.c_proj": row("tp"),
            },
            "ln_f": "replicate",
        },
        "tie lm_head.weight": "transformer.wte.weight",
        "lm_head": st.vocab_head("tp", pad=8),
        "use": "cross_entropy()",
    }
    return Plan.from_rules(rules, f"tp={world}")


def bert(world: int) -> Plan:
    rules = {
        "**.encoder.layer.*": {
            "attention.self": {
                "in": "replicate",
                "{query,key,value}": column("tp", unit=4),
                "local num_attention_heads": "[tp]",
                "local all_head_size": "[tp unit(4)]",
            },
            "attention.output.dense": row("tp", unit=4),
            "intermediate.dense": column("tp"),
            "output.dense": row("tp"),
            "**.LayerNorm": "replicate",
        },
        "**.embeddings.word_embeddings": st.vocab_embedding("tp", pad=8),
        "**.embeddings.{position,token_type}_embeddings": "replicate",
        "**.embeddings.LayerNorm": "replicate",
        "optional **.pooler.dense": "replicate",
        "optional **.embeddings.{position_ids,token_type_ids}": "replicate",
    }
    return Plan.from_rules(rules, f"tp={world}")


def t5(world: int) -> Plan:
    rules = {
        "shared": st.vocab_embedding("tp", pad=8),
        "tie {encoder,decoder}.embed_tokens.weight": "shared.weight",
        "{encoder,decoder}": {
            "block.*.layer.*": {
                "{SelfAttention,EncDecAttention}": {
                    "in": "replicate",
                    "in key_value_states": "replicate",
                    "in position_bias": "[-, tp, ...]",
                    "{q,k,v}": column("tp", unit=4),
                    "o": row("tp", unit=4),
                    "optional relative_attention_bias": {"weight": "[-, tp]", "out": "[..., tp]"},
                    "local n_heads": "[tp]",
                    "local inner_dim": "[tp unit(4)]",
                },
                "DenseReluDense": {"in": "replicate", "optional wi_{0,1}": column("tp"), "wo": row("tp")},
                "layer_norm": "replicate",
            },
            "final_layer_norm": "replicate",
        },
        "tie lm_head.weight": "shared.weight",
        "lm_head": st.vocab_head("tp", pad=8),
        "use": "cross_entropy()",
    }
    return Plan.from_rules(rules, f"tp={world}")


def mixtral_plan(world: int, tp: int = 2, ep: int = 2, store: str = "") -> Plan:
    copies = "replicate grad partial(tp)"
    rules = {
        "model": {
            "embed_tokens": st.vocab_embedding("tp", pad=2),
            "layers.*": {
                "*_layernorm": "replicate",
                "self_attn": {
                    "in": "replicate",
                    "{q,k,v}_proj": column("tp", unit=4),
                    "o_proj": row("tp", unit=4),
                },
                "optional mlp.gate": "replicate",
                "optional mlp.experts": {
                    "gate_up_proj": "[ep, tp blocks(2), -]",
                    "down_proj": "[ep, -, tp]",
                    "in": copies,
                    "in top_k_weights": copies,
                    "use": "dispatch(ep, top_k=2)",
                    "out": "partial(tp) -> replicate",
                },
                "optional block_sparse_moe": {
                    "gate": "replicate",
                    "use": "dispatch(ep, top_k=2, logits=true)",
                    "experts.<ep>": {"in": "replicate", "w{1,3}": column("tp"), "w2": row("tp")},
                },
            },
            "norm": "replicate",
        },
        "lm_head": st.vocab_head("tp", pad=2),
        "use": "cross_entropy()",
    }
    return Plan.from_rules(rules, f"dp={world // (tp * ep)}, ep={ep}, tp={tp}", data="dp*ep")


def vit(world: int) -> Plan:
    rules = {
        "vit": {
            "embeddings": "replicate",
            "encoder.layer.*": {
                "layernorm_{before,after}": "replicate",
                "attention.attention": {
                    "in": "replicate",
                    "{query,key,value}": column("tp", unit=4),
                    "local num_attention_heads": "[tp]",
                    "local all_head_size": "[tp unit(4)]",
                },
                "attention.output.dense": row("tp", unit=4),
                "intermediate.dense": column("tp"),
                "output.dense": row("tp"),
            },
            "layernorm": "replicate",
        },
        "classifier": "replicate",
    }
    return Plan.from_rules(rules, f"tp={world}")


def vocab(world: int) -> Plan:
    rules = {
        "embed": {"weight": "[tp pad(8), -]", "out": "partial(tp) -> replicate"},
        "head": {"weight": "[tp pad(8), -]", "in": "replicate", "out": "[..., tp pad(8)]"},
        "tie head.weight": "embed.weight",
        "use": "cross_entropy()",
    }
    return Plan.from_rules(rules, f"tp={world}")


def uneven(world: int, device: str = "cpu") -> Plan:
    places = [f"rank:{rank}/{device}" for rank in range(4)]
    listed = "[" + ", ".join(f'"{place}"' for place in places) + "]"
    rules = {
        "h.*": {
            "attn": {
                "in": "replicate",
                "{q,k,v}": {"weight": "[tp unit(2) balanced, -]", "out": "[..., tp unit(2) balanced]"},
                "o": {
                    "weight": "[-, tp unit(2) balanced]",
                    "in": "[..., tp unit(2) balanced]",
                    "out": "partial(tp) -> replicate",
                },
            },
            "mlp.up.weight": "[tp balanced, -]",
            "mlp.down.weight": "[-, tp balanced]",
            "gate.weight": "[tp sizes(12, 12, 8, 8), -]",
        },
        "embed.weight": f"chunk(dim=0, placements={listed})",
        "big.weight": f"grid(splits=(2, 2), placements={listed})",
        "big.bias": "replicate",
        "odd.weight": f'enum([0:5, 0:4] @ "{places[0]}", [5:10, 0:4] @ "{places[1]}")',
    }
    return Plan.from_rules(rules, f"tp={world}")


def fsdp(world: int, copies: int = 1, grain: Any = 1) -> Plan:
    rules = {"**": "replicate", "store **": f"flat(dp, unit={grain}) by model.layers.*"}
    return Plan.from_rules(rules, f"rep={copies}, dp={world // copies}", data="rep*dp")
