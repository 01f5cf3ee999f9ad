"""Faults leave parameters, hyperparameters and memory as they were; conversions and small floats do not change laws."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from zero_models import MODES, dense, reducing, zero

import shardtensor as st
from shardtensor.comm.process_group import as_group


def half(value):
    param = nn.Parameter(torch.zeros(6, dtype=torch.float16))
    optimizer = reducing([param], optim.SGD, lr=1.0)
    (param * value).sum().backward()
    average = param.grad.full_tensor()
    assert torch.equal(average, torch.full_like(average, value)), average
    optimizer.zero_grad()


@pytest.mark.worlds("sim", "gloo")
def test_averages_of_float16_do_not_overflow(world):
    world(half, 3, value=40000.0)


def converted(mode):
    params = list(dense(["matrix", "bias", "last"]).values())
    optimizer = zero(params, optim.SGD, mode, lr=0.1)
    for param in params:
        param.data = param.data.double()
        param.grad = torch.full_like(param, 1 / 3)
    if mode == "owners":
        optimizer.step()
        group = as_group()
        for param in params:
            mine = param.detach().clone()
            assert torch.equal(group.broadcast(mine.clone(), 1), mine), "no rank has rounded values"
        return
    before = [param.detach().clone() for param in params]
    with pytest.raises(st.StaleParameterError, match="nothing was stepped"):
        optimizer.step()
    assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("mode", MODES)
def test_converted_parameters_are_equal_on_all_ranks_or_an_error(world, mode):
    world(converted, 2, mode=mode)


OTHERS = {
    "module": {"module": True},
    "lr of a group": {"group": {"lr": 0.5}},
    "offload": {"offload_state": True},
    "views": {"parameters_as_bucket_view": True},
    "bucket": {"bucket_mib": 3.0},
}


def options_differ(what):
    linear = nn.Linear(3, 2)
    options = dict(OTHERS[what]) if as_group().rank else {}
    groups = [{"params": list(linear.parameters()), **options.pop("group", {})}]
    if options.pop("module", False):
        options["module"] = linear
    with pytest.raises(st.DisagreementError):
        st.ZeroRedundancyOptimizer(groups, optim.SGD, overlap_gradients=True, lr=0.1, **options)


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("what", OTHERS)
def test_options_that_differ_between_ranks(world, what):
    world(options_differ, 2, what=what)


def refused():
    params = list(dense(["matrix", "bias"]).values())
    pointers = [param.data_ptr() for param in params]
    with pytest.raises(ValueError, match="learning rate"):
        zero(params, optim.SGD, "ranges", lr=-1.0)
    assert [param.data_ptr() for param in params] == pointers, "no parameter was moved to a bucket"


@pytest.mark.worlds("sim")
def test_refused_options_move_no_parameter(world):
    world(refused, 2)


class Rows(optim.SGD):
    update_unit = "row"


def loads(kind):
    params = list(dense(["matrix", "bias"]).values())
    optimizer = zero(params, Rows, "ranges", lr=0.1, momentum=0.9)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.consolidate_state_dict()
    state = as_group().exchange_objects(optimizer.state_dict() if as_group().rank == 0 else None)[0]
    state["param_groups"][0]["lr"] = 0.7
    if kind == "rows":
        state["state"][0]["momentum_buffer"] = torch.ones(9, 3)
    elif as_group().rank == 1:
        del state["state"]
    with pytest.raises(st.LayoutError):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == optimizer.optim.param_groups[0]["lr"] == 0.1


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("kind", ["rows", "malformed on one rank"])
def test_a_refused_load_changes_nothing(world, kind):
    world(loads, 2, kind=kind)


class Fails(optim.SGD):
    update_unit = "element"

    def step(self, closure=None):
        raise ZeroDivisionError


def fails():
    params = list(dense(["matrix", "bias"]).values())
    optimizer = zero(params, Fails, "ranges", lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all(leaf.grad is None for group in optimizer.optim.param_groups for leaf in group["params"])


@pytest.mark.worlds("sim")
def test_a_step_that_fails_keeps_no_gradients(world):
    world(fails, 2)


def added(what):
    linear = nn.Linear(3, 2)
    optimizer = st.ZeroRedundancyOptimizer(linear.named_parameters(), optim.SGD, overlap_gradients=True, lr=0.1)
    more = {
        "sparse": [torch.ones(2, 2).to_sparse().requires_grad_()],
        "name": [("weight", nn.Parameter(torch.ones(2)))],
    }[what]
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": more})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
    linear(torch.ones(4, 3)).sum().backward()
    optimizer.step()


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("what", ["sparse", "name"])
def test_a_refused_group_changes_nothing(world, what):
    world(added, 2, what=what)
