"""Keys of config.json files that tests of several commands read plans for."""

from __future__ import annotations

LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip
SMALL = {
    "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 240, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL_MIXTRAL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
