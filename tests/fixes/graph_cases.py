"""Errors of steps that are captured in a CUDA graph, played on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from harness.recorded_ops import RecordedOps

import shardtensor as st
from fixes.case import Act, Case, mlp
from shardtensor.comm import process_group
from shardtensor.optim import graphs

X = torch.ones(2, 4)
ADAM = sys.modules["torch.optim.adam"]


class Training:
    """A model, its optimizer, and what may go wrong in a step of them."""

    def __init__(self, make: Any = torch.optim.AdamW, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = mlp().to(dtype)
        self.optimizer = make(self.model.parameters(), **{"lr": 0.1, "fused": True, **options})

    def step(self, x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x.to(self.model[0].weight.dtype)).square().sum() * scale
        loss.backward()
        self.optimizer.step()
        return loss


def played(act: Act) -> Act:
    """Graphs are written down and played again on the CPU."""

    def run() -> Any:
        with (
            mock.patch.object(graphs, "_recorder_on", side_effect=lambda device: RecordedOps()),
            mock.patch.object(process_group, "_live", set()),
            mock.patch.object(
                sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", return_value=["cpu"]
            ),
        ):
            return act()

    return run


def calls(step: Callable[..., Any], *args: tuple[Any, ...], warmup: int = 1, after: Act | None = None) -> Any:
    """Two calls that run and are captured, and one for each further argument tuple."""
    train = st.graphed_step(step, device="cpu", warmup=warmup)
    for each in args or ((X,),) * (warmup + 2):
        train(*each)
        if after is not None:
            after()
    return train


def made(*args: Any, **options: Any) -> Act:
    """A step of an optimizer that is made so is captured."""
    return played(lambda: calls(Training(*args, **options).step))


def scheduled(inside: bool) -> Any:
    training = Training()
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = training.step(x)
        if inside:
            schedule.step()
        return loss

    return calls(step, after=None if inside else schedule.step)


def late_state(warmup: int) -> Any:
    """An optimizer that steps from the second call on."""
    training = Training()
    step_of, count = training.optimizer.step, iter(range(10))
    training.optimizer.step = lambda: step_of() if next(count) else None
    return calls(training.step, warmup=warmup)


def kept_gradients(inside: bool) -> Any:
    training = Training()

    def step(x: torch.Tensor) -> torch.Tensor:
        if inside:
            training.optimizer.zero_grad()
        loss = training.model(x).sum()
        loss.backward()
        training.optimizer.step()
        return loss

    return calls(step, after=None if inside else training.optimizer.zero_grad)


def adafactor() -> Training:
    training = Training(torch.optim.SGD)
    training.optimizer = torch.optim.Adafactor(training.model.parameters())
    return training


def stepped_after() -> Any:
    """Forward and backward are captured; the optimizer steps after them."""
    training = adafactor()
    step, training.optimizer.step = training.optimizer.step, lambda: None
    return calls(training.step, after=step)


def closed(again: bool) -> Any:
    training = Training()
    train = calls(training.step)
    train.close()
    return calls(training.step) if again else train(X)


def reading(reads: bool) -> Any:
    training = Training()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = training.step(x)
        return loss * loss.item() if reads else loss

    return calls(step)


def scaled(*scales: Any) -> Any:
    training = Training()
    return calls(training.step, *((X, scale) for scale in scales))


def of_rows(without_graph: bool) -> Any:
    training = Training()
    train = calls(training.step)
    more = torch.ones(3, 4)
    return training.step(more) if without_graph else calls(training.step, (more,), (more,), (more,)) and train


CASES: dict[str, Case] = {
    "a learning rate that changes inside": Case(
        played(lambda: scheduled(inside=True)),
        {"call scheduler.step() after the graphed step, not in it": played(lambda: scheduled(inside=False))},
        mesh="",
    ),
    "state made while it is captured": Case(
        played(lambda: late_state(warmup=1)),
        {"a larger warmup=, in which every parameter has a gradient": played(lambda: late_state(warmup=2))},
        mesh="",
    ),
    "gradients dropped outside": Case(
        played(lambda: kept_gradients(inside=False)),
        {"call optimizer.zero_grad() inside the step": played(lambda: kept_gradients(inside=True))},
        mesh="",
    ),
    "a step in low precision": Case(
        made(dtype=torch.bfloat16, fused=None, capturable=True),
        {
            "AdamW(..., fused=True)": made(dtype=torch.bfloat16),
            "parameters in float32": made(fused=None, capturable=True),
        },
        mesh="",
    ),
    "numbers of the host": Case(
        made(fused=None),
        {"AdamW(..., fused=True)": made(), "AdamW(..., capturable=True)": made(fused=None, capturable=True)},
        mesh="",
    ),
    "an optimizer that decides on the host": Case(
        played(lambda: calls(adafactor().step)),
        {
            "call its step() after the graphed step, or use AdamW(..., fused=True)": lambda: [
                played(stepped_after)(),
                made()(),
            ]
        },
        mesh="",
    ),
    "a graphed step that was closed": Case(
        played(lambda: closed(again=False)),
        {"make another graphed_step of the same step": played(lambda: closed(again=True))},
        mesh="",
    ),
    "a tensor read on the host": Case(
        played(lambda: reading(reads=True)),
        {
            "leave out what reads a tensor on the host": played(lambda: reading(reads=False)),
            "pass it as an argument": played(lambda: scaled(*map(torch.tensor, (1.0, 2.0, 3.0)))),
        },
        mesh="",
    ),
    "another number": Case(
        played(lambda: scaled(2.0, 2.0, 3.0)),
        {
            "call the step itself, without a graph, for a batch of another shape": played(lambda: of_rows(True)),
            "make another graphed_step of it; what changes from call to call has to be in tensors": lambda: [
                played(lambda: of_rows(False))(),
                played(lambda: scaled(*map(torch.tensor, (2.0, 2.0, 3.0))))(),
            ],
        },
        mesh="",
    ),
}
