"""The search finds what trying everything finds, and takes no time; values that pass are those that check passes."""

from __future__ import annotations

import time
from itertools import product

import pytest
from configs import LLAMA_8B, SMALL, SMALL_MIXTRAL

from shardtensor.cost.profile import read_profile
from shardtensor.errors import PlanError, SpecError
from shardtensor.plan.estimates.estimate import Batch, Collective, TracedStep, data_ranks, step_seconds
from shardtensor.plan.estimates.memory import plan_bytes
from shardtensor.plan.estimates.search import candidates, readable_plan, search
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.text.reading import read_plan

H100 = read_profile("h100")


def model_of(plan, config, world):
    return model_from_dims(readable_plan(plan, config=config, world=world))


def step_of(plan, samples, seq):
    """Some step that hangs on the mesh of a plan."""
    axes = [(name, size) for name, size in plan.axes.mesh.axes if size > 1]
    sent = tuple(Collective("forward", "all_reduce", (name,), size, 1, samples * seq << 8, "fc") for name, size in axes)
    return TracedStep(sent, 1e9 * samples * seq, samples * seq << 8)


def by_hand(plan, config, world, names, batch, memory_bytes):
    """Every combination of values up to the world and of switches, read, resolved and estimated one by one."""
    model, found = model_of("llama" if "\n" in plan else plan, config, world), {}
    ranges = [(False, True) if name == "sp" else range(1, world + 1) for name in names]
    for values in product(*ranges):
        params = dict(zip(names, values, strict=True))
        try:
            read = read_plan(plan, config=config, world=world, params=params)
        except SpecError:
            continue
        resolved = resolve(read, model)
        if resolved.errors or batch.samples % data_ranks(resolved):
            continue
        held = plan_bytes(resolved).most
        step = step_of(read, batch.samples // data_ranks(resolved), batch.seq)
        if held.total + step.activation_bytes <= memory_bytes:
            found[values] = step_seconds(resolved, step, H100, batch.dtype, held).total
    return found


@pytest.mark.parametrize(
    ("plan", "config", "world", "names", "memory_bytes"),
    [
        ("llama", SMALL, 12, ("tp", "sp"), 1 << 40),
        ("llama", SMALL, 12, ("tp", "sp"), 3 << 20),
        ("llama_2d", SMALL, 12, ("tp", "sp"), 5 << 20),
        ("fsdp", SMALL, 12, ("copies",), 1 << 40),
        ("mixtral", SMALL_MIXTRAL, 8, ("tp", "ep"), 1 << 40),
        ("shard 1\nparam tp = world\nmesh (tp)\n**: replicate\n", SMALL, 2, ("tp",), 1 << 40),
    ],
)
def test_a_search_finds_what_trying_everything_finds(plan, config, world, names, memory_bytes):
    batch = Batch(48, 32)
    model = model_of("llama" if "\n" in plan else plan, config, world)
    choices = search(
        plan, model, config=config, world=world, memory_bytes=memory_bytes, batch=batch,
        profile=H100, trace=step_of,
    )  # fmt: skip
    passed = {tuple(c.params[name] for name in names): c.seconds.total for c in choices if c.seconds is not None}
    assert passed == by_hand(plan, config, world, names, batch, memory_bytes)
    assert list(passed.values()) == sorted(passed.values())
    assert passed
    assert all(bool(c.fault) == (c.seconds is None) for c in choices)
    assert all(c.bytes <= memory_bytes for c in choices if not c.fault)


def test_8b_on_64_ranks_is_searched_in_a_moment():
    start = time.perf_counter()
    model = model_of("llama_2d", LLAMA_8B, 64)
    choices = search(
        "llama_2d", model, config=LLAMA_8B, world=64, memory_bytes=80 << 30, batch=Batch(64, 4096), profile=H100
    )
    assert time.perf_counter() - start < 5
    assert not choices[0].fault
    assert {choice.params["tp"] for choice in choices} == {1, 2, 4, 8, 16, 32, 64}


def test_values_that_are_given_stay():
    tried = candidates("llama", config=SMALL, world=12, params={"sp": True})
    assert tried == tuple({"tp": tp} for tp in (1, 2, 3, 4, 6, 12))
    with pytest.raises(PlanError, match="no parameter that changes its mesh"):
        candidates("llama", config=SMALL, world=12, params={"tp": 3})


def test_without_a_step_meshes_are_ranked_by_bytes():
    model = model_of("llama_2d", SMALL, 12)
    choices = search("llama_2d", model, config=SMALL, world=12, memory_bytes=1 << 40, batch=Batch(12, 32), profile=H100)
    passed = [choice for choice in choices if not choice.fault]
    assert len(passed) > 1 and all(choice.seconds is None for choice in passed)
    assert [choice.bytes for choice in passed] == sorted(choice.bytes for choice in passed)


def test_what_refuses_a_mesh_is_said():
    model = model_of("llama", SMALL, 12)
    choices = search("llama", model, config=SMALL, world=12, memory_bytes=1 << 40, batch=Batch(6, 32), profile=H100)
    faults = {choice.params["tp"]: choice.fault for choice in choices}
    assert faults[4].startswith("E106: requirement not met")
    assert faults[1] == "6 samples cannot be dealt to 12 data ranks"
    least = search("llama", model, config=SMALL, world=12, memory_bytes=1 << 10, batch=Batch(12, 32), profile=H100)
    assert all(choice.fault for choice in least)
    assert any("of 1.0 KiB" in choice.fault for choice in least)
