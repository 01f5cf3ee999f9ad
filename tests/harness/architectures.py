"""Small models of transformers of many architectures, for the tests of imported plans and the table of what works."""

from __future__ import annotations

import copy
from typing import Any

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "image_size": 32,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 63, "max_position_embeddings": 64, "patch_size": 8,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_embd": 64, "n_head": 8,
    "n_layer": 2, "n_positions": 64, "ffn_dim": 96, "word_embed_proj_dim": 64, "d_model": 64, "d_ff": 96, "d_kv": 8,
    "num_layers": 2, "num_decoder_layers": 2, "num_heads": 8, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "max_source_positions": 16, "num_mel_bins": 8, "shared_expert_intermediate_size": 32, "n_heads": 8, "n_layers": 2,
    "hidden_dim": 96, "dim": 64, "intermediate_size_mlp": 96, "sliding_window": 16, "embedding_size": 32,
    "n_shared_experts": 1, "rotary_dim": 4, "decoder_start_token_id": 0, "new_decoder_architecture": False,
    "multi_query": False, "num_kv_heads": 8, "mamba_d_state": 4, "projection_dim": 32,
    "attn_layer_offset": 1, "attn_layer_period": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "topk_method": "greedy",
}  # fmt: skip

CLASSES = {
    **dict.fromkeys(("albert", "bert", "distilbert", "electra", "modernbert", "roberta"), "AutoModelForMaskedLM"),
    **dict.fromkeys(("dinov2", "vit"), "AutoModelForImageClassification"),
    **dict.fromkeys(("bart", "t5"), "AutoModelForSeq2SeqLM"),
    "whisper": "AutoModelForSpeechSeq2Seq",
    "clip": "AutoModel",
}
"""The class of an architecture that is no causal language model."""

ARCHITECTURES = """
    llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text phi phi3 deepseek_v2 deepseek_v3
    gpt_neox gpt2 opt bloom falcon bert roberta vit t5 whisper clip mamba olmo2 granite glm4 cohere2 starcoder2 stablelm
    smollm3 gpt_oss llama4_text jamba mpt bart modernbert dinov2 apertus qwen3_next
""".split()


def small_model(name: str, **sizes: Any) -> Any:
    """Return a model of an architecture, in float64 and evaluation mode, with equal values at each call.

    Args:
        **sizes: keys of its configuration, in place of the usual ones.
    """
    import torch
    import transformers

    from shardtensor.trace.example import with_noise

    config = _config(transformers.models.auto.CONFIG_MAPPING[name], sizes)
    for part in (config, *(each for each in vars(config).values() if hasattr(each, "to_dict"))):
        part._experts_implementation = "eager"  # the others do not know float64
    family = getattr(transformers, CLASSES.get(name, "AutoModelForCausalLM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = family._model_mapping[type(config)]
        return with_noise(kind._from_config(config, attn_implementation="eager")).double().eval()


def off_after_three_steps(module: Any, text: str, **params: int) -> float:
    """Train a module and a dense copy of it, on this rank; return how far apart their parameters are, relative to how
    far they moved. With the plan "fsdp" each rank sees another sample, else all see the same."""
    import torch

    import shardtensor as st
    from shardtensor.comm.process_group import as_group
    from shardtensor.trace.example import example_step

    group, oracle, module = as_group(), copy.deepcopy(module), copy.deepcopy(module)
    samples, own = (range(group.size), group.rank) if text == "fsdp" else (range(1), 0)
    before = {name: parameter.detach().clone() for name, parameter in oracle.named_parameters()}
    plan = text if text == "auto" else st.load_plan(text, config=module.config, world=group.size, **params)
    st.shard_module(module, plan)
    dense = torch.optim.SGD(oracle.parameters(), lr=0.05, momentum=0.9)
    sharded = st.ShardedOptimizer(module, torch.optim.SGD, lr=0.05, momentum=0.9)
    for step in range(3):
        torch.stack([example_step(oracle, 10 * step + sample, 8) for sample in samples]).mean().backward()
        example_step(module, 10 * step + own, 8).backward()
        for optimizer in (dense, sharded):
            optimizer.step()
            optimizer.zero_grad()
    apart = moved = 0.0
    for (name, want), got in zip(oracle.named_parameters(), module.parameters(), strict=True):
        got = got.full_tensor() if isinstance(got, st.ShardedTensor) else got
        apart += float((got - want).detach().square().sum())
        moved += float((want - before[name]).detach().square().sum())
    return (apart / moved) ** 0.5


def _config(kind: Any, changed: dict[str, Any]) -> Any:
    """Return a configuration of small sizes; of layers of several types two, or one of each type."""
    default, sizes = kind(), SIZES | changed
    if hasattr(default, "kv_lora_rank"):
        sizes |= LATENT
        del sizes["head_dim"]
    if default.model_type == "falcon":  # a property there
        del sizes["head_dim"]
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(types) > 1 and not isinstance(getattr(kind, "layer_types", None), property):
        sizes |= {"num_hidden_layers": len(types), "layer_types": types}
    if hasattr(default, "text_config"):
        parts = {key: type(part) for key, part in vars(default).items() if hasattr(part, "to_dict")}
        own = {key: size for key, size in SIZES.items() if not key.endswith("_token_id")}
        made = {key: _filled(part, own | {"projection_dim": 32}) for key, part in parts.items()}
        return kind(**made, projection_dim=32)
    return _filled(kind, sizes)


def _filled(kind: Any, sizes: dict[str, Any]) -> Any:
    default, names = kind(), getattr(kind, "attribute_map", {})
    twice = {key for key, name in names.items() if name in sizes}
    return kind(**{key: size for key, size in sizes.items() if hasattr(default, key) and key not in twice})
