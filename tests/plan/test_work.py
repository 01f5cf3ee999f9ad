"""FLOPs and activations of a step: what the textbook says of whole models, shared out by the layouts."""

from __future__ import annotations

import attrs
import pytest
from resolved_by_hand import MEGATRON, decoder, info, resolved

from shardtensor.plan.models.model import Model
from shardtensor.plan.outlook.work import Batch, kept_bytes, step_flops

BATCH = Batch(8, 128)


def linear_weights(model):
    return sum(t.numel for t in model.tensors if len(t.shape) == 2 and "embed" not in t.name)


def test_a_product_counts_six_for_each_weight_and_token():
    model = decoder(3, 64, 256, 1000)
    plan = resolved(model, "dp=1, tp=1")
    assert step_flops(plan, BATCH) == 6 * linear_weights(model) * BATCH.tokens


def test_attention_counts_the_pairs_that_a_token_sees():
    model = attrs.evolve(decoder(3, 64), config={"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64})
    more = step_flops(resolved(model, "tp=1"), BATCH) - step_flops(resolved(decoder(3, 64), "tp=1"), BATCH)
    assert more == 6 * 3 * 64 * 128 * BATCH.tokens


@pytest.mark.parametrize("mesh", ["dp=2, tp=4", "dp=8, tp=1", "dp=1, tp=8", "dp=4, tp=2"])
def test_ranks_share_the_work(mesh):
    model = decoder(3, 64, 256, 1000)
    plan = resolved(model, mesh, MEGATRON, data=("dp",))
    whole = step_flops(resolved(model, "dp=1, tp=1"), BATCH)
    assert step_flops(plan, BATCH) == pytest.approx(whole / 8, rel=0.01)  # the vocabulary is padded


def test_layers_that_are_not_cut_are_computed_by_every_rank():
    model = decoder(3, 64, 256, 1000)
    assert step_flops(resolved(model, "tp=4"), BATCH) == step_flops(resolved(model, "tp=1"), BATCH)


@pytest.mark.parametrize("layout", ["stacked", "listed"])
def test_experts_meet_the_tokens_that_are_sent_to_them(layout):
    config = {"num_local_experts": 4, "num_experts_per_tok": 2}
    if layout == "stacked":
        model = Model((info("mlp.experts.up_proj", (4, 64, 32)),), config=config)
        specs = {"mlp.experts.up_proj": "[ep, -, -]"}
    else:
        model = Model(tuple(info(f"mlp.experts.{i}.up.weight", (64, 32)) for i in range(4)), config=config)
        specs = {f"mlp.experts.{i}.up.weight": f"[-, -] only(ep, {i // 2})" for i in range(4)}
    whole = 6 * 2 * 64 * 32 * BATCH.tokens
    assert step_flops(resolved(model, "ep=2", specs, data=("ep",)), BATCH) == whole / 2
    assert step_flops(resolved(model, "ep=1", data=("ep",)), BATCH) == whole


def test_activations_are_shared_out_too():
    model = decoder(3, 64, 256, 1000)
    whole = kept_bytes(resolved(model, "dp=1, tp=1"), BATCH)
    assert kept_bytes(resolved(model, "dp=8, tp=1", data=("dp",)), BATCH) == whole / 8
    cut = kept_bytes(resolved(model, "tp=4", MEGATRON), BATCH)
    assert whole / 4 < cut < whole
    per_layer = (
        3 * 64 + 64 + 64 + 64 + 2 * 256 + 64 + 256 + 64
    )  # q, k, v, their input, o, its input; the same of the MLP
    assert whole == (3 * per_layer + 64 + 2 * 1000) * BATCH.tokens * 2
