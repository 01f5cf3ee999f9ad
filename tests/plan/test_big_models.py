"""What it takes to read, check and price a plan grows as the number of tensors does, and no faster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.loading import load_plan
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import read_plan

MIXTRAL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_experts_per_tok": 2, "vocab_size": 128,
}  # fmt: skip


def mixtral(layers: int, experts: int) -> tuple[Plan, Model]:
    config = MIXTRAL | {"num_hidden_layers": layers, "num_local_experts": experts}
    plan = load_plan("mixtral", config=config, world=16, ep=4, tp=4, published=True)
    return plan, model_from_dims(plan)


def calls(work: Callable[[], Any]) -> int:
    """How many functions of Python run: what time is spent on, without a clock."""
    count = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def steps(layers: int, experts: int) -> dict[str, int]:
    plan, model = mixtral(layers, experts)
    resolved = resolve(plan, model)
    assert not resolved.errors
    return {
        "resolve": calls(lambda: resolve(plan, model)),
        "check": calls(lambda: check_plan(resolved)),
        "tensors": len(model.tensors),
    }


@pytest.mark.parametrize(("more", "of"), [((8, 16), "layers"), ((4, 32), "experts")], ids=["layers", "experts"])
def test_twice_the_tensors_take_twice_the_work(more, of):
    steps(*more)  # what is kept from call to call is there
    one, two = steps(4, 16), steps(*more)
    grown = two.pop("tensors") / one.pop("tensors")
    for name, count in two.items():
        assert count / one[name] < 1.15 * grown, f"{name}: {one[name]} calls become {count} with twice the {of}"


@pytest.mark.parametrize(("what", "most"), [("resolve", 60), ("check", 240)])
def test_a_tensor_takes_a_few_calls(what, most):
    """A clock would tell the same, and another on each machine: two seconds for 46,000 tensors."""
    found = steps(8, 16)
    assert found[what] / found["tensors"] < most


def test_a_name_of_many_segments_is_a_name():
    name = ".".join(["a"] * 5000)
    model = Model((TensorInfo(f"{name}.weight", (8,)),))
    resolved = resolve(read_plan("shard 1\nmesh (tp = 2)\n**: [tp]\n", world=2), model)
    assert list(resolved.tensors) == [f"{name}.weight"]
    assert not [finding for finding in check_plan(resolved) if finding.severity == "error"]
    assert len(model.paths) == 5001
