"""Optimizer state on the CPU between steps: the same steps, and no copy before what it reads is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from zero_models import assert_equal, set_grads, twins, zero

import shardtensor as st
from shardtensor.comm import streams
from shardtensor.optim.zero.offload import OffloadedState


def on_the_cpu(mode):
    params, oracle_params = twins(["matrix", "bias", "last"])
    optimizer, oracle = (
        zero(params, optim.Adam, mode, offload_state=True, lr=0.1),
        optim.Adam(oracle_params.values(), lr=0.1),
    )
    for step in range(3):
        set_grads(step, params, oracle_params)
        optimizer.step()
        oracle.step()
    assert_equal(params, oracle_params)
    optimizer.consolidate_state_dict()


@pytest.mark.worlds("sim")
@pytest.mark.parametrize("mode", ["owners", "ranges"])
def test_on_a_cpu_it_only_steps(world, mode):
    world(on_the_cpu, 2, mode=mode)


class Log(list[tuple[Any, ...]]):
    """What the stand-in's streams do, in order."""


class Side(streams.Stream):
    """A stream of the stand-in."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def follow(self) -> None:
        self.log.append((self.name, "follows the caller"))

    def mark(self, event: Any) -> None:
        event.append(self.name)
        self.log.append((self.name, "marks", id(event)))

    def join(self) -> None:
        self.log.append(("caller", "joins", self.name))

    def synchronize(self) -> None:
        self.log.append(("host", "waits", self.name))


class StandIn:
    """Streams of a device that is the CPU."""

    is_cuda, device = True, torch.device("cpu")

    def __init__(self, log: Log) -> None:
        self.log, self.names = log, iter(["in", "out"])

    def refresh(self) -> bool:
        return False

    def stream(self) -> Side:
        return Side(next(self.names), self.log)

    def event(self) -> list[str]:
        return []

    def wait(self, event: list[str]) -> None:
        assert event, "it waits for an event that was marked"
        self.log.append(("caller", "waits", id(event)))


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> tuple[OffloadedState, optim.Optimizer, Log]:
    log = Log()
    monkeypatch.setattr("shardtensor.optim.zero.offload.Streams", lambda device: StandIn(log))
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **kw: empty_like(x, **{**kw, "pin_memory": False}))
    params = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    optimizer = optim.Adam([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}], lr=0.1)
    return OffloadedState(optimizer, torch.device("cpu")), optimizer, log


def test_tensors_are_stepped_one_by_one_each_after_its_state_came(offloaded):
    state, optimizer, log = offloaded
    params = [param for group in optimizer.param_groups for param in group["params"]]
    oracle_params = [nn.Parameter(param.detach().clone()) for param in params]
    oracle = optim.Adam([{"params": oracle_params[:3]}, {"params": oracle_params[3:], "lr": 0.5}], lr=0.1)
    for number in range(3):
        for i, (param, twin) in enumerate(zip(params, oracle_params, strict=True)):
            param.grad = twin.grad = None if i == 1 and number == 1 else torch.full((3,), float(i + number))
        log.clear()

        def step():
            log.append(("caller", "steps", sum(len(group["params"]) for group in optimizer.param_groups)))
            optimizer.step()

        state.step(step)
        oracle.step()
        for param, twin in zip(params, oracle_params, strict=True):
            assert torch.equal(param, twin)
        steps = [entry[2] for entry in log if entry[1] == "steps"]
        assert steps == [1] * (3 if number == 1 else 4)
        assert log[-1] == ("caller", "joins", "out"), "the next step waits until the state has left"
        check_order(log)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]


def check_order(log: Log) -> None:
    """Before step i: its state came; step i - 2 left. The state of i + 1 is fetched before step i, and waits for no
    later step."""
    steps = 0
    marks: dict[str, list[int]] = {"in": [], "out": []}
    waited: list[int] = []
    for entry in log:
        if entry[1] == "marks":
            marks[entry[0]].append(entry[2])
        elif entry[:2] == ("caller", "waits"):
            waited.append(entry[2])
        elif entry[1] == "steps":
            assert marks["in"][steps] in waited
            assert steps < 2 or marks["out"][steps - 2] in waited
            steps += 1
            assert len(marks["out"]) == steps - 1


def test_an_error_in_a_step_leaves_the_groups_as_they_were(offloaded):
    state, optimizer, _ = offloaded
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        state.step(lambda: 1 / 0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]


class Unknown(optim.SGD):
    """It may update parameters together."""


def test_a_class_that_may_update_parameters_together_is_refused():
    with pytest.raises(st.RuleError, match="update_unit"):
        st.ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], Unknown, offload_state=True, lr=0.1)
    Unknown.update_unit = "parameter"
    st.ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], Unknown, offload_state=True, lr=0.1)
