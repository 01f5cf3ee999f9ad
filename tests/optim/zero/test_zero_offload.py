"""Optimizer state on the CPU between steps: the same steps, and no copy before what it reads is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from zero_models import assert_equal, set_grads, twins, zero

import shardtensor as st
from shardtensor.comm import streams
from shardtensor.optim.zero.division import OffloadedState


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

    def wait(self, event: Any) -> None:
        assert event, "it waits for an event that was marked"
        self.log.append((self.name, "waits", id(event)))

    def uses(self, tensor: torch.Tensor) -> None:
        self.log.append((self.name, "uses", tensor))

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
    monkeypatch.setattr("shardtensor.optim.zero.division.Streams", lambda device: StandIn(log))
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **kw: empty_like(x, **{**kw, "pin_memory": False}))
    params = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
    optimizer = optim.Adam([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}], lr=0.1)
    return OffloadedState(optimizer, torch.device("cpu")), optimizer, log


def trained(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def test_steps_wait_for_state_and_fetches_for_its_copies_to_the_cpu(offloaded):
    """With and without a fetch in backward, also if a parameter has no gradient in a step."""
    state, optimizer, log = offloaded
    params = trained(optimizer)
    oracle_params = [nn.Parameter(param.detach().clone()) for param in params]
    oracle = optim.Adam([{"params": oracle_params[:3]}, {"params": oracle_params[3:], "lr": 0.5}], lr=0.1)
    for number in range(4):
        for i, (param, twin) in enumerate(zip(params, oracle_params, strict=True)):
            param.grad = twin.grad = None if i == 1 and number == 2 else torch.full((3,), float(i + number))
        log.clear()
        if number % 2:
            state.fetch(params[::-1][:2])
            state.fetch(params[::-1][:3])

        def step():
            log.append(("caller", "steps"))
            optimizer.step()

        state.step(step)
        oracle.step()
        assert all(torch.equal(param, twin) for param, twin in zip(params, oracle_params, strict=True))
        at = log.index(("caller", "steps"))
        before, after = log[:at], log[at + 1 :]
        marked = [entry[2] for entry in before if entry[:2] == ("in", "marks")]
        assert marked and set(marked) <= {entry[2] for entry in before if entry[:2] == ("caller", "waits")}
        assert after[0] == ("out", "follows the caller"), "copies to the CPU read what the step wrote"
        assert all(entry[0] == "out" for entry in after)
        put = {entry[2] for entry in after if entry[1] == "marks"}
        waits = {entry[2] for entry in before if entry[:2] == ("in", "waits")}
        stepped = 3 if number == 2 else 4
        assert len(put) == stepped
        assert len(waits) == (0 if number == 0 else stepped), "a fetch waits for the copy of the same state"
        assert len([entry for entry in after if entry[1] == "uses"]) == 2 * stepped, "their memory is kept until then"


def test_state_that_is_fetched_and_not_stepped_leaves_again(offloaded):
    state, optimizer, log = offloaded
    params = trained(optimizer)
    for param in params:
        param.grad = torch.ones(3)
    state.step(optimizer.step)
    params[0].grad = None
    state.fetch(params)
    log.clear()
    state.step(optimizer.step)
    assert len([entry for entry in log if entry[:2] == ("out", "marks")]) == 4
    state.synchronize()
    assert log[-1] == ("host", "waits", "out")


def test_an_error_in_a_step_is_raised_and_the_next_step_runs(offloaded):
    state, optimizer, _ = offloaded
    for param in trained(optimizer):
        param.grad = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        state.step(lambda: 1 / 0)
    state.step(optimizer.step)
    assert all(len(optimizer.state[param]) == 3 for param in trained(optimizer))


class Unknown(optim.SGD):
    """It may update parameters together."""


def test_any_class_may_be_offloaded():
    param = nn.Parameter(torch.ones(2))
    optimizer = st.ZeroRedundancyOptimizer([param], Unknown, offload_state=True, lr=0.5)
    param.grad = torch.ones(2)
    optimizer.step()
    assert param.tolist() == [0.5, 0.5]
