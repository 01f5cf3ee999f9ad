"""Models of transformers of many architectures: three steps of training with an imported plan, or fully sharded, give
the parameters of the dense model."""

from __future__ import annotations

import pytest
import torch
from harness import FULL
from harness.architectures import ARCHITECTURES, off_after_three_steps, small_model

from shardtensor.parallel.model_info import model_info
from shardtensor.plan.loading import load_plan, packaged_for
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.match.resolve import resolve
from shardtensor.trace.imported import imported_plan

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SOME = """
    llama mixtral qwen2_moe qwen3 gemma2 phi phi3 deepseek_v3 gpt_neox gpt2 opt bloom bert vit t5 whisper clip stablelm
    gpt_oss apertus
""".split()


@pytest.mark.parametrize("size", [2, 4] if FULL else [2])
@pytest.mark.parametrize("how", ["imported", "fsdp"])
@pytest.mark.parametrize("name", ARCHITECTURES if FULL else SOME)
@pytest.mark.worlds("sim")
def test_three_steps_are_those_of_the_dense_model(world, name, how, size):
    module = small_model(name)
    for off in world(
        off_after_three_steps, size, module=module, text="fsdp" if how == "fsdp" else imported_plan(module).text
    ):
        assert off < 1e-5, "some of their code computes in float32"


VARIANTS = {
    **{name: (name, {}) for name in ("bloom", "deepseek_v3", "falcon", "gpt_oss", "mamba")},
    "falcon, groups of heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "bias": True}),
    "falcon, one key head": ("falcon", {"multi_query": True}),
    "falcon, biases of scores": ("falcon", {"alibi": True, "parallel_attn": False, "bias": True}),
    "deepseek_v3, whole queries": ("deepseek_v3", {"q_lora_rank": None}),
    "mamba, biases": ("mamba", {"use_bias": True, "use_conv_bias": False}),
}
WHOLE = {
    "deepseek_v3": {
        "self_attn.q_a_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
    },
    "gpt_oss": {"mlp.router.weight", "mlp.experts.down_proj_bias"},
    "falcon, one key head": {
        "transformer.h.*.self_attention.query_key_value.weight",
        "transformer.h.*.self_attention.dense.weight",
    },
}
QUICK = ["bloom", "deepseek_v3", "falcon, groups of heads", "falcon, biases of scores", "gpt_oss", "mamba"]


@pytest.mark.parametrize("size", [2, 4] if FULL else [2])
@pytest.mark.parametrize("variant", VARIANTS if FULL else QUICK)
@pytest.mark.worlds("sim")
def test_three_steps_with_a_plan_of_the_package_are_those_of_the_dense_model(world, variant, size):
    name, sizes = VARIANTS[variant]
    module = small_model(name, **sizes)
    for off in world(off_after_three_steps, size, module=module, text=packaged_for(module.config.to_dict())):
        assert off < 1e-5, "some of their code computes in float32"


@pytest.mark.worlds("sim")
def test_latent_attention_over_some_ranks_and_experts_over_others(world):
    module = small_model("deepseek_v3")
    for off in world(off_after_three_steps, 4, module=module, text="deepseek_v3", tp=2, ep=2):
        assert off < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plan_of_the_package_shards_what_the_imported_one_leaves_whole(variant):
    """All weights of layers but those of one key head, of routers and of latent values."""
    name, sizes = VARIANTS[variant]
    module = small_model(name, **sizes)
    resolved = resolve(load_plan("auto", config=module.config, world=2), model_info(module))
    whole = {
        starred(name).rpartition(".layers.*.")[2]
        for name, placed in resolved.tensors.items()
        if "*" in starred(name) and len(placed.tensor.shape) > 1 and placed.layout.is_replicated
    }
    assert whole <= WHOLE.get(variant, WHOLE.get(name, set()))
