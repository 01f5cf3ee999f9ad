"""Keys of the config.json files of public models: those from which names and shapes of tensors follow."""

from __future__ import annotations

from typing import Any


def _decoder(name: str, kind: str, vocab: int, hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict:
    return {
        "architectures": [name], "model_type": kind, "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


LLAMA3_8B = _decoder(
    "LlamaForCausalLM", "llama", 128256, 4096, 14336, 32, 32, num_key_value_heads=8, attention_bias=False
)
MISTRAL_7B = _decoder("MistralForCausalLM", "mistral", 32000, 4096, 14336, 32, 32, num_key_value_heads=8)
QWEN2_7B = _decoder("Qwen2ForCausalLM", "qwen2", 152064, 3584, 18944, 28, 28, num_key_value_heads=4)
MIXTRAL_8X7B = _decoder(
    "MixtralForCausalLM", "mixtral", 32000, 4096, 14336, 32, 32, num_key_value_heads=8, num_local_experts=8,
    num_experts_per_tok=2,
)  # fmt: skip
COVERED = {"llama": LLAMA3_8B, "mistral": MISTRAL_7B, "qwen2": QWEN2_7B, "mixtral": MIXTRAL_8X7B}

OTHERS = {
    "Qwen3-8B": _decoder(  # a norm of q and of k in each layer
        "Qwen3ForCausalLM", "qwen3", 151936, 4096, 12288, 36, 32, num_key_value_heads=8, head_dim=128,
        attention_bias=False, max_window_layers=36,
    ),
    "Qwen3-30B-A3B": _decoder(  # 128 small experts
        "Qwen3MoeForCausalLM", "qwen3_moe", 151936, 2048, 6144, 48, 32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1,
    ),
    "DeepSeek-V3": _decoder(  # latent attention, 256 experts and a shared one
        "DeepseekV3ForCausalLM", "deepseek_v3", 129280, 7168, 18432, 61, 128, num_key_value_heads=128,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
        q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        first_k_dense_replace=3,
    ),
    "gemma-7b": _decoder(
        "GemmaForCausalLM", "gemma", 256000, 3072, 24576, 28, 16, num_key_value_heads=16, head_dim=256
    ),
    "Phi-3-mini": _decoder("Phi3ForCausalLM", "phi3", 32064, 3072, 8192, 32, 32, num_key_value_heads=32),  # fused qkv
    "gpt-oss-20b": _decoder(
        "GptOssForCausalLM", "gpt_oss", 201088, 2880, 2880, 24, 64, num_key_value_heads=8, head_dim=64,
        num_local_experts=32, num_experts_per_tok=4, attention_bias=True,
    ),
    "OLMo-2-7B": _decoder("Olmo2ForCausalLM", "olmo2", 100352, 4096, 11008, 32, 32, num_key_value_heads=32),
    "a reward model": _decoder("LlamaForSequenceClassification", "llama", 128256, 4096, 14336, 32, 32),  # no lm_head
}  # fmt: skip
"""Which no plan of the package has the tensors of."""
