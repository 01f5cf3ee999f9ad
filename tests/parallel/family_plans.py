"""The shipped plans for tiny models of their families, and what one training step of each is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from harness import device
from harness.tiny.bert import BertModel
from harness.tiny.gpt2 import GPT2LMHeadModel
from harness.tiny.llama import LlamaForCausalLM
from harness.tiny.mixtral import mixtral
from harness.tiny.mlp import MLP
from harness.tiny.t5 import T5ForConditionalGeneration
from harness.tiny.uneven import Uneven
from harness.tiny.vit import ViTForImageClassification
from harness.tiny.vocab import Vocab
from torch import nn

import shardtensor
from shardtensor.plan.loading import load_plan
from shardtensor.plan.plan import Plan

SPECS = Path(shardtensor.__file__).parent.parent / "specs"

STORED = """shard 1
let hd = config.n_embd / config.n_head
mesh (dp = 2, tp = 2)
data dp
embed.weight: [tp sizes(5, 3), -]
h.* {
    attn {
        in: replicate
        {q,k,v} {
            weight: [tp unit(hd) balanced, -]
            out: [..., tp unit(hd) balanced]
        }
        o {
            weight: [-, tp unit(hd) balanced]
            in:  [..., tp unit(hd) balanced]
            out: partial(tp) -> replicate
        }
    }
    mlp.up.weight:   [tp sizes(18, 0), -]
    mlp.down.weight: [-, tp sizes(18, 0)]
    gate.weight:     replicate
}
{big,odd}.weight: replicate
store **: flat(dp) by h.*
"""
"""A plan for `Uneven`: stored parts of different sizes."""


@attrs.frozen
class Family:
    """How to make a model and a batch of `n` samples, what the loss is, and the keys of its configuration."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], torch.Tensor]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    config: dict[str, Any] = attrs.field(factory=dict)


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


def pooled(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    x, first = model(ids)
    return (x.mean(1) + first).square().mean()


_LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 8}
_TIED = _LLAMA | {"tie_word_embeddings": True}
_MIXTRAL = _LLAMA | {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_BERT = {"num_attention_heads": 4, "hidden_size": 16}

FAMILIES = {
    "mlp": Family(MLP, _floats, square),
    "llama": Family(LlamaForCausalLM, _ids, own_loss, _LLAMA),
    "llama_tied": Family(lambda: LlamaForCausalLM(tied=True, bias=True, vocab=128), _ids, own_loss, _TIED),
    "gpt2": Family(GPT2LMHeadModel, _ids, outer_loss, {"n_head": 4, "n_embd": 16}),
    "bert": Family(BertModel, _ids, pooled, _BERT),
    "bert_two_heads": Family(lambda: BertModel(heads=2), _ids, pooled, _BERT | {"num_attention_heads": 2}),
    "t5": Family(T5ForConditionalGeneration, _ids, outer_loss, {"num_heads": 4, "d_kv": 4}),
    "mixtral": Family(lambda: mixtral(stacked=False), _ids, own_loss, _MIXTRAL),
    "mixtral_stacked": Family(lambda: mixtral(stacked=True), _ids, own_loss, _MIXTRAL),
    "vit": Family(ViTForImageClassification, _images, square, _BERT),
    "vocab": Family(Vocab, _ids, outer_loss),
    "uneven": Family(Uneven, _few_ids, square, {"n_embd": 10, "n_head": 5}),
}


def plan_for(name: str, family: str, world: int, **params: Any) -> Plan:
    """A shipped plan, or the text of one, for the configuration of a family."""
    if name.startswith("shard 1"):
        return load_plan(name, config=FAMILIES[family].config, world=world, **params)
    text = (SPECS / f"{name}.shard").read_text()
    where: Any = SPECS / f"{name}.shard"
    if "/cuda:" in text and device().type == "cpu":  # ranks of gloo, which may outnumber the GPUs
        where = re.sub(r"/cuda:\d(-\d)?", "/cpu", text)
    return load_plan(where, config=FAMILIES[family].config, world=world, **params)
