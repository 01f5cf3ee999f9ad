"""The collectives of a step: laws that they keep, and what is printed for plans that ship.

That they are those which run is shown in tests/sharding/test_plan_traffic.py, call by call.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from shardtensor.plan.loading import load_plan, read_config
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.traffic.collectives import describe, folded, step_collectives

MODELS = Path(__file__).parent / "models"


def resolved(plan: str, model: str, world: int, **params):
    config, source = read_config(MODELS / model / "config.json")
    told = load_plan(plan, config=config, world=world, **params)
    return resolve(told, model_from_dims(told, source))


def test_of_llama_with_sequence_parallel():
    found = step_collectives(resolved("llama", "llama3-8b", 8, sp=True), batch=1, seq=4096, clipping=True)
    assert describe(found) == (
        """\
forward    1 x all_reduce       tp=8  32.0 MiB  model.embed_tokens: its addends are summed
forward    32 x all_gather      tp=8  32.0 MiB  model.layers.*.self_attn: its input is gathered
forward    32 x reduce_scatter  tp=8  32.0 MiB  model.layers.*.self_attn.o_proj: its addends are summed
forward    32 x all_gather      tp=8  32.0 MiB  model.layers.*.mlp: its input is gathered
forward    32 x reduce_scatter  tp=8  32.0 MiB  model.layers.*.mlp.down_proj: its addends are summed
forward    1 x all_gather       tp=8  32.0 MiB  lm_head: its input is gathered
forward    1 x all_reduce       tp=8  16.0 KiB  lm_head: the loss: largest logits
forward    1 x all_reduce       tp=8  32.0 KiB  lm_head: the loss: sums and logits of targets
backward   1 x reduce_scatter   tp=8  32.0 MiB  lm_head: its input's gradient is summed
backward   1 x all_reduce       tp=8   8.0 KiB  model.norm.weight: its gradient is summed
backward   32 x all_reduce      tp=8   8.0 KiB  model.layers.*.post_attention_layernorm.weight: its gradient is summed
backward   32 x all_reduce      tp=8   8.0 KiB  model.layers.*.input_layernorm.weight: its gradient is summed
backward   32 x all_gather      tp=8  32.0 MiB  model.layers.*.mlp.down_proj: its gradient is gathered
backward   32 x reduce_scatter  tp=8  32.0 MiB  model.layers.*.mlp: its input's gradient is summed
backward   32 x all_gather      tp=8  32.0 MiB  model.layers.*.self_attn.o_proj: its gradient is gathered
backward   32 x reduce_scatter  tp=8  32.0 MiB  model.layers.*.self_attn: its input's gradient is summed
backward   1 x all_gather       tp=8  32.0 MiB  model.layers.*: its input's gradient is gathered
optimizer  1 x all_reduce       tp=8       8 B  the model: the norm of gradients"""
    )


def test_copies_of_keys_are_summed_over_their_factor_alone():
    found = step_collectives(resolved("llama", "llama3-8b", 16, tp=16), batch=1, seq=8)
    keys = [each for each in found if each.axes == ("kvr",)]
    assert [(each.where, each.group_size, each.count, each.bytes) for each in keys] == [
        ("model.layers.*.self_attn.v_proj.weight", 2, 32, 128 * 4096 * 2),
        ("model.layers.*.self_attn.k_proj.weight", 2, 32, 128 * 4096 * 2),
    ]


def test_stored_units_of_copies():
    found = step_collectives(resolved("fsdp", "llama3-8b", 8, copies=2), batch=1, seq=8)
    kinds = {(each.phase, each.kind, each.axes, each.where): each.count for each in found}
    assert kinds["forward", "all_gather", ("dp",), "model.layers.*"] == 32
    assert kinds["backward", "all_gather", ("dp",), "model.layers.*"] == 30, "the last two are still there"
    assert kinds["backward", "reduce_scatter", ("dp",), "model.layers.*"] == 32
    assert kinds["backward", "all_reduce", ("rep",), "model.layers.*"] == 32
    gathered = next(each for each in found if each.where == "model.layers.*" and each.kind == "all_gather")
    assert gathered.received_bytes * 4 == gathered.bytes * 3


def test_tokens_of_experts_are_sent_out_and_back():
    found = step_collectives(resolved("mixtral", "mixtral-8x7b", 8), batch=1, seq=4096)
    rows = [each for each in found if each.kind == "all_to_all" and each.dtype != "int64"]
    assert [(each.phase, each.count, each.bytes) for each in rows] == [
        (phase, 32, 4096 * 2 * 4096 * 2) for phase in ("forward", "forward", "backward", "backward")
    ]


CASES = [
    ("llama", "llama3-8b", 8, {"sp": True}), ("llama", "qwen2-7b", 8, {"tp": 4}), ("gpt2", "gpt2", 4, {}),
    ("bert", "minilm", 4, {}), ("vit", "vit-base", 4, {}), ("llama_2d", "llama3-8b", 16, {}),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "model", "world", "params"), CASES)
def test_laws(plan, model, world, params):
    told = resolved(plan, model, world, **params)
    once, twice = (step_collectives(told, batch=n, seq=64) for n in (1, 2))
    inference = step_collectives(told, batch=1, seq=64, training=False)
    assert {each.phase for each in inference} <= {"forward"}
    assert [each for each in once if each.phase == "forward"] == list(inference)
    assert folded(once) == once, "folding again changes nothing"
    for one, two in zip(once, twice, strict=True):
        same = attrs.evolve(two, bytes=one.bytes, sent_bytes=one.sent_bytes, received_bytes=one.received_bytes)
        assert same == one
        assert two.bytes in (one.bytes, 2 * one.bytes)
        assert one.group_size > 1 and 0 < one.received_bytes <= 2 * one.bytes


def test_a_plan_of_one_rank_sends_nothing():
    assert step_collectives(resolved("gpt2", "gpt2", 1), batch=1, seq=8, clipping=True) == ()
