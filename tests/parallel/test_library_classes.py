"""Each family's plan on the real classes of a model library, small: outputs and every gradient as the dense model's."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtensor as st
from shardtensor.plan.loading import load_plan

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs pip install .[real-weights]"
)

DECODER = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
MIXTRAL = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
T5 = {
    "vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
ENCODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BERT = ENCODER | {"vocab_size": 101}
VIT = ENCODER | {"image_size": 8, "patch_size": 4}
CASES = {
    "llama": ("LlamaForCausalLM", DECODER, "llama", {"tp": 4}),
    "llama-biased": ("LlamaForCausalLM", DECODER | {"attention_bias": True, "mlp_bias": True}, "llama", {"tp": 4}),
    "llama-sp": ("LlamaForCausalLM", DECODER, "llama", {"tp": 4, "sp": True}),
    "llama-shared-kv": ("LlamaForCausalLM", DECODER | {"num_key_value_heads": 2}, "llama", {"tp": 4}),
    "llama-shared-kv-sp": ("LlamaForCausalLM", DECODER | {"num_key_value_heads": 2}, "llama", {"tp": 4, "sp": True}),
    "llama-tied": ("LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}, "llama", {"tp": 4, "sp": True}),
    "mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 4}, "llama", {"tp": 4}),
    "qwen2": ("Qwen2ForCausalLM", DECODER, "llama", {"tp": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 101, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "gpt2",
        {},
    ),
    "bert": ("BertModel", BERT, "bert", {}),
    "bert-3-heads": ("BertModel", BERT | {"hidden_size": 48, "num_attention_heads": 3}, "bert", {}),
    "bert-mlm": ("BertForMaskedLM", BERT, "bert", {}),
    "t5": ("T5ForConditionalGeneration", T5, "t5", {}),
    "t5-gated": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "d_kv": 6}, "t5", {}),
    "mixtral-tp": ("MixtralForCausalLM", MIXTRAL, "mixtral", {"tp": 4, "ep": 1}),
    "mixtral-ep": ("MixtralForCausalLM", MIXTRAL, "mixtral", {"tp": 1, "ep": 4}),
    "mixtral": ("MixtralForCausalLM", MIXTRAL, "mixtral", {"tp": 2, "ep": 2}),
    "llama-data": ("LlamaForCausalLM", DECODER, "llama", {"tp": 2, "sp": True}),
    "llama-2d": ("LlamaForCausalLM", DECODER | {"vocab_size": 128}, "llama_2d", {"tp": 2}),
    "fsdp-llama": ("LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}, "fsdp", {"grain": 4}),
    "fsdp-t5": ("T5ForConditionalGeneration", T5, "fsdp", {"copies": 2}),
    "vit": ("ViTModel", VIT, "vit", {}),
    "vit-classifier": ("ViTForImageClassification", VIT | {"num_labels": 5}, "vit", {}),
}  # fmt: skip


def _built(name: str) -> tuple[nn.Module, dict[str, Any], str, dict[str, Any]]:
    class_name, keys, plan, params = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        cls = getattr(transformers, class_name)
        torch.manual_seed(5)
        config = cls.config_class(**keys)
        return cls(config).double().eval(), config.to_dict(), plan, params


def _batch(model: nn.Module) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=made, dtype=torch.float64)}
    ids = torch.randint(3, 101, (2, 8), generator=made)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][1, -2:] = 0
    return batch | ({"decoder_input_ids": ids[:, :4]} if hasattr(model.config, "d_kv") else {})


def _first(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the model gives: logits, or states; whole."""
    out = model(**batch)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def _parity(name: str) -> dict[str, float]:
    """The relative difference of the output and of each gradient from the dense model's."""
    torch.set_num_threads(1)
    dense, config, plan_name, params = _built(name)
    sharded = _built(name)[0]
    plan = load_plan(plan_name, config=config, world=dist.get_world_size(), **params)
    st.shard_module(sharded, plan)
    batch = _batch(dense)
    expected, found = _first(dense, batch), _first(sharded, batch)
    found = found.full_tensor() if isinstance(found, st.ShardedTensor) else found
    differences = {"": _difference(found.detach(), expected.detach())}
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    others = dict(dense.named_parameters())
    for parameter_name, parameter in sharded.named_parameters():
        other = others[parameter_name].grad
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, st.ShardedTensor) else grad
        assert (grad is None) == (other is None), parameter_name
        if grad is not None:
            differences[parameter_name] = _difference(grad, other)
    return differences


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the largest element; of gradients that are all but zero (of a key's bias), absolute."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("name", CASES)
def test_a_plan_runs_the_classes_of_the_library_as_they_are(world, name):
    near = 1e-6 if name.startswith("mixtral") else 1e-12  # its router computes in float32
    for differences in world(_parity, 4, name=name):
        wrong = {name: found for name, found in differences.items() if found > near}
        assert not wrong
