"""Models of transformers, sharded by their own tensor-parallel plans: logits and gradients are the dense ones.

Runs where transformers is installed.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

import shardtensor as st
from shardtensor.cli.main import main
from shardtensor.parallel.model_info import model_info

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 63, "max_position_embeddings": 64,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def made(name: str) -> Any:
    torch.manual_seed(0)
    kind = transformers.models.auto.CONFIG_MAPPING[name]
    default, sizes = kind(), dict(SMALL)
    if hasattr(default, "kv_lora_rank"):
        sizes |= LATENT
        del sizes["head_dim"]
    config = kind(**{key: value for key, value in sizes.items() if hasattr(default, key)})
    config._experts_implementation = "eager"  # the others do not know float64
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()


def off_the_dense_model(name: str) -> tuple[float, float]:
    oracle = made(name)
    module = copy.deepcopy(oracle)
    plan = st.plan_from_hf(dict(module.tp_plan), config=module.config, world=2, model=model_info(module))
    st.shard_module(module, plan)
    ids = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(1))
    want = oracle(input_ids=ids, use_cache=False).logits
    got = module(input_ids=ids, use_cache=False).logits
    got = got.full_tensor() if isinstance(got, st.ShardedTensor) else got
    weight = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(2))
    (want * weight).sum().backward()
    (got * weight).sum().backward()
    found, worst = dict(module.named_parameters()), 0.0
    for key, parameter in oracle.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 1e-12:
            grad = found[key].grad
            grad = grad.full_tensor() if isinstance(grad, st.ShardedTensor) else grad
            worst = max(worst, float((grad - parameter.grad).norm() / parameter.grad.norm()))
    return float((got - want).abs().max() / want.abs().max()), worst


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "qwen3_moe", "granite_swa", "hy_v4"])
@pytest.mark.worlds("sim")
def test_an_imported_plan_gives_the_dense_logits_and_gradients(world, name):
    for logits, gradients in world(off_the_dense_model, 2, name=name):
        assert logits < 1e-12
        assert gradients < 1e-6, "routers and norms compute in float32"


def test_a_plan_imported_from_a_config_is_checked_against_it(tmp_path, capsys):
    keys = {key: SMALL[key] for key in list(SMALL)[:7]} | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    config, plan = tmp_path / "config.json", tmp_path / "p.shard"
    config.write_text(json.dumps(keys))
    assert main(["import", "hf", str(config)]) == 0
    plan.write_text(capsys.readouterr().out)
    assert main(["check", str(plan), "--model", str(config), "--world", "4"]) == 0
    assert f"{3 + 2 * 11} tensors" in capsys.readouterr().out
