"""Tiny models have the tensors and attributes of real ones; their plans pass, and their gradients are right."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from harness import FULL
from harness.tiny.model import tiny_model
from harness.tiny.names import unnumbered
from harness.tiny.world import small_plan
from plan.recorded_models import FROM_DIMS, MORE_WORLDS, NAMES, OTHERS, case_id, config_path, recorded, resolved_for

from shardtensor.errors import SpecError
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.models.model import TensorInfo
from shardtensor.plan.resolved import Resolved
from shardtensor.trace.check import check_numeric

Case = tuple[str, str, int, dict[str, Any]]
OWN: list[Case] = [("mlp", "", 4, {}), ("vocab", "", 4, {}), ("uneven", "", 4, {})]
SOME: list[Case] = [
    ("llama", "qwen2-0.5b", 2, {"tp": 2, "sp": True}),
    ("llama", "llama3-8b", 64, {"tp": 4}),
    ("llama_2d", "llama3-8b", 8, {"tp": 4}),
    ("mixtral", "mixtral-8x7b", 4, {"tp": 2, "ep": 2}),
    ("mixtral", "mixtral-8x7b-file", 4, {"tp": 1, "ep": 4, "published": True}),
    ("gpt2", "gpt2", 4, {}),
    ("gpt2", "gpt2-file", 2, {}),
    ("bert", "minilm", 8, {}),  # heads do not divide: the written fallback
    ("bert", "bert-base-mlm", 4, {}),
    ("t5", "t5-small", 4, {}),
    ("t5", "flan-t5-small", 2, {}),
    ("vit", "vit-base-classifier", 4, {}),
    ("vit", "vit-base-file", 2, {"published": True}),
    ("fsdp", "llama3-8b", 64, {"copies": 2}),
    *OWN,
]


def resolved_of(plan: str, model: str, world: int, params: dict[str, Any]) -> Resolved:
    if model:
        return resolved_for(plan, model, world, params)
    read = load_plan(plan, world=world, **params)
    return resolve(read, model_from_dims(read))


@pytest.mark.parametrize(("plan", "model", "world", "params"), SOME, ids=case_id)
def test_no_check_tells_anything_of_a_shipped_plan(plan, model, world, params):
    resolved = resolved_of(plan, model, world, params)
    assert not [finding for finding in check_plan(resolved) if finding.severity != "note"]
    tiny = tiny_model(plan, resolved, params)
    assert check_numeric(tiny.plan, tiny.make) == ()


@pytest.mark.skipif(not FULL, reason="SHARDTENSOR_TEST_FULL=1 runs all recorded models")
@pytest.mark.parametrize(("plan", "model", "world", "params"), FROM_DIMS + OTHERS + MORE_WORLDS, ids=case_id)
def test_nor_of_any_other_model_and_world(plan, model, world, params):
    tiny = tiny_model(plan, resolved_of(plan, model, world, params), params)
    assert check_numeric(tiny.plan, tiny.make) == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_model_is_like_the_recorded_one(name):
    """Modules of equal paths have its attributes that count, and of each argument that plans name."""
    real = recorded(name)
    tiny = tiny_model("fsdp", resolved_for("fsdp", name, 4, {}), {})
    made = model_info(tiny.make())
    assert {unnumbered(t.name) for t in made.tensors} == {unnumbered(t.name) for t in real.tensors}
    assert {len(t.shape) for t in made.tensors} == {len(t.shape) for t in real.tensors}
    for path, module in made.modules.items():
        if path in real.modules and module.class_name == "Linear":
            assert real.modules[path].class_name == "Linear", path
        if path in real.modules and path.endswith(("attn", "attention", "self", "Attention")):
            assert set(real.modules[path].counts) <= set(module.counts), path


@pytest.mark.parametrize(
    ("name", "model", "world", "params", "mesh"),
    [
        ("llama", "llama3.1-405b", 16384, {"tp": 8}, "(dp=2, kvg=8, kvr=1)"),
        ("llama", "llama3.1-405b", 16384, {"tp": 16}, "(dp=2, kvg=8, kvr=2)"),
        ("mixtral", "mixtral-8x7b", 24, {"tp": 2}, "(dp=3, ep=4, tp=2)"),
        ("gpt2", "gpt2", 12, {}, "(tp=12)"),
        ("llama", "llama3.1-405b", 4096, {"tp": 64}, "(dp=2, kvg=8, kvr=2)"),  # too many: the mesh is another
    ],
)
def test_only_ranks_that_see_other_samples_become_fewer(name, model, world, params, mesh):
    plan = load_plan(name, config=config_path(model), world=world, **params)
    small, _ = small_plan(name, plan, params)
    assert str(small.axes.mesh) == mesh


def test_sizes_grow_until_the_plan_takes_them(tmp_path):
    """A plan that cuts in quantisation blocks, and asks for a width, gets a tiny model with such ones."""
    path = tmp_path / "mlp.shard"
    path.write_text(
        "shard 1\nparam tp = world\nmesh (tp)\n"
        'require (config.intermediate_size ?? 4096) % 64 == 0 "whole blocks"\n'
        "fc1 {\n weight: [tp unit(32), -]\n bias: [tp unit(32)]\n in: replicate\n out: [..., tp unit(32)]\n}\n"
        "fc2 {\n weight: [-, tp unit(32)]\n bias: replicate\n in: [..., tp unit(32)]\n"
        " out: partial(tp) -> replicate\n}\n"
        "dims fc1.weight (out = 4096, in = 64)\ndims fc1.bias (out = 4096)\n"
        "dims fc2.weight (out = 64, in = 4096)\ndims fc2.bias (out = 64)\n"
    )
    plan = load_plan(path, world=2)
    tiny = tiny_model(path, resolve(plan, model_from_dims(plan)), {})
    assert tiny.config["intermediate_size"] == 64
    assert check_numeric(tiny.plan, tiny.make) == ()


def test_a_model_with_a_tensor_besides_is_not_taken_for_the_family():
    resolved = resolved_for("fsdp", "llama3-8b", 2, {})
    other = attrs.evolve(resolved.model, tensors=(*resolved.model.tensors, TensorInfo("model.layers.0.extra.w", (4,))))
    with pytest.raises(SpecError, match=r"the tiny Llama has other tensors(.|\n)*it has not *model.layers.0.extra.w"):
        tiny_model("fsdp", resolve(resolved.plan, other), {})
