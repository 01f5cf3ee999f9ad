"""The bytes that a plan names for a partitioned optimizer are those that ranks hold after a step."""

from __future__ import annotations

import pytest
import torch
from harness import every_size
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as some
from resolved_by_hand import resolved
from torch import nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import PlanError
from shardtensor.layout.partition import Param, held_bytes
from shardtensor.plan.estimates.memory import ZERO, plan_bytes, rank_bytes
from shardtensor.plan.models.model import Model as PlanModel
from shardtensor.plan.models.model import TensorInfo

SHAPES = ((5, 7), (64, 96), (3,), (), (300, 300), (17, 2), (0, 4), (41,))


class Model(nn.Module):
    """Parameters of several sizes; the fourth is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
        self.params[3].requires_grad = False

    def forward(self) -> torch.Tensor:
        return sum(param.square().sum() for param in self.params)  # type: ignore[return-value]


def plan_of(model, ranks):
    tensors = [
        TensorInfo(name, tuple(x.shape), None, "float32", False, x.requires_grad)
        for name, x in model.named_parameters()
    ]
    return resolved(PlanModel(tuple(tensors)), f"dp={ranks}", data=("dp",))


def bytes_of(mode):
    partition, is_reduced = ZERO[mode]
    group, model = as_group(), Model()
    optimizer = st.ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.AdamW, partition=partition, overlap_gradients=is_reduced, lr=0.1
    )
    model().backward()
    optimizer.step()
    storages = {}
    for param in model.parameters():
        storage = param.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    found = [sum(storages.values())]
    if is_reduced:
        averages = {}
        for param in model.parameters():
            if param.grad is not None:
                storage = param.grad._local.untyped_storage()
                averages[storage.data_ptr()] = storage.nbytes()
        found.append(sum(averages.values()))
    else:
        found.append(sum(param.grad.nbytes for param in model.parameters() if param.grad is not None))
    state = [x for values in optimizer.optim.state.values() for key, x in values.items() if key != "step"]
    found.append(sum(x.nbytes for x in state))
    held = rank_bytes(plan_of(model, group.size), group.rank, zero=mode)
    assert found == [held.parameters, held.gradients, held.optimizer], (found, held)


@every_size
@pytest.mark.worlds("sim")
@pytest.mark.parametrize("mode", ZERO)
def test_bytes_are_those_that_ranks_hold(world, mode, size):
    world(bytes_of, size, mode=mode)


@pytest.mark.parametrize("mode", ZERO)
def test_extremes_are_those_of_all_ranks(mode):
    plan = plan_of(Model(), 3)
    each = [rank_bytes(plan, rank, zero=mode).total for rank in range(3)]
    found = plan_bytes(plan, zero=mode)
    assert (found.least.total, found.most.total) == (min(each), max(each))


def test_sharded_parameters_are_refused():
    model = PlanModel((TensorInfo("a.weight", (4, 4)),))
    with pytest.raises(PlanError, match="leave --zero out"):
        plan_bytes(resolved(model, "dp=2, tp=2", {"a.weight": "[tp, -]"}, data=("dp",)), zero="owners")


@examples(60)
@given(
    some.lists(some.tuples(some.integers(0, 4000), some.booleans(), some.sampled_from([2, 4])), min_size=1, max_size=9),
    some.integers(1, 5),
    some.sampled_from(sorted(ZERO)),
)
def test_ranks_hold_all_state_once(sizes, ranks, mode):
    """Padding aside, the state of all ranks is that of all trained parameters."""
    params = [Param(length, item, trains, item) for length, trains, item in sizes]
    partition, is_reduced = ZERO[mode]
    each = [held_bytes(params, ranks, rank, partition, is_reduced=is_reduced) for rank in range(ranks)]
    trained = sum(param.length * param.itemsize for param in params if param.trains)
    state = sum(held.state for held in each)
    assert trained <= state <= trained + sum(held.parameters for held in each)
    assert len({held.parameters for held in each}) == 1
    assert min(held.parameters for held in each) >= sum(param.length * param.itemsize for param in params)
