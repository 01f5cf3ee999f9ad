"""Errors of compiled train steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fixes.case import Case, mlp
from shardtensor.fsdp import fully_shard
from shardtensor.fsdp.data_parallel import data_parallel
from shardtensor.parallel.shard_module import shard_module
from shardtensor.spmd import DataParallel, compile

X = torch.ones(2, 4)


def good(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    return loss


def adding(model: Any, optimizer: Any, x: Any) -> None:
    model(x).mean().backward()
    optimizer.step()


def reading(model: Any, optimizer: Any, x: Any) -> None:
    loss = model(x).mean()
    if loss > 0:
        loss.backward()


def choosing(model: Any, optimizer: Any, x: Any) -> None:
    loss = model(x).mean()
    torch.where(loss > 0, loss, 0 * loss).backward()


def over_samples(model: Any, optimizer: Any, x: Any) -> None:
    torch.logcumsumexp(model(x), 0).mean().backward()


def of_each_sample(model: Any, optimizer: Any, x: Any) -> None:
    torch.logsumexp(model(x), 1).mean().backward()


def looping(model: Any, optimizer: Any, x: Any) -> None:
    sum(model(row).mean() for row in x).backward()


def breaking(model: Any, optimizer: Any, x: Any) -> None:
    raise ValueError("wrong")


def replacing(model: Any, optimizer: Any, x: Any) -> None:
    model[0].bias = nn.Parameter(torch.zeros(8))


def filling(model: Any, optimizer: Any, x: Any) -> None:
    with torch.no_grad():
        model[0].bias.copy_(torch.zeros(8))


def slowing(model: Any, optimizer: Any, x: Any) -> None:
    good(model, optimizer, x)
    optimizer.param_groups[0]["lr"] = 0.01


def run(step: Callable[..., Any], x: torch.Tensor = X, *, calls: int = 1, dim: int = 0) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compile(step, parallel_mode=DataParallel(input_batch_dim=dim), backend="eager")
    for _ in range(calls):
        compiled(model, optimizer, x)
    return compiled


def eagerly(step: Callable[..., Any], spread: Callable[[nn.Module], Any]) -> None:
    model = mlp()
    spread(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), X)


def without(*, of_head: bool) -> None:
    """A step without its module, or without one of two."""
    model, head = mlp(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    step = compile(lambda *args: None, backend="eager")
    step(*([model] if of_head else []), optimizer, X)


def with_head() -> None:
    model, head = mlp(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    compile(lambda model, head, optimizer, x: good(nn.Sequential(model, head), optimizer, x), backend="eager")(
        model, head, optimizer, X
    )


def foreign(*, passes: bool) -> None:
    model = mlp()
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, x: Any, optimizer: Any = other) -> None:
        good(model, optimizer, x)

    compiled = compile(step, backend="eager")
    compiled(model, X, *([other] if passes else []))


def pair(first: int, second: int, dim: int = 0) -> None:
    model = mlp()
    shapes = [(rows, 4) if dim == 0 else (4, rows) for rows in (first, second)]
    step = compile(
        lambda model, a, b: (model(a.T if dim else a).sum() + model(b.T if dim else b).sum()).backward(),
        parallel_mode=DataParallel(input_batch_dim=dim),
        backend="eager",
    )
    step(model, *map(torch.ones, shapes))


def changed(resets: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(good, backend="eager")
    step(model, optimizer, X)
    model[0].bias = nn.Parameter(torch.zeros(8))
    if resets:
        step.reset()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, X)


def scheduled() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(good, backend="eager")
    for _ in range(2):
        step(model, optimizer, X)
        optimizer.param_groups[0]["lr"] *= 0.5
    assert step.compiles == 1


def dropping_outside() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(adding, backend="eager")
    for _ in range(2):
        optimizer.zero_grad()
        step(model, optimizer, X)


def of_two(sharded: bool) -> None:
    """A plan and two modules."""
    plan = {"0.weight": "replicate"}
    model, head = mlp(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    if sharded:
        shard_module(model, plan)
    mode = DataParallel() if sharded else plan
    compile(lambda model, head, *rest: good(nn.Sequential(model, head), *rest), parallel_mode=mode, backend="eager")(
        model, head, optimizer, X
    )


def evaluating(model: Any, optimizer: Any, x: Any) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def again(compiles: bool) -> None:
    """An optimizer that evaluates the loss again."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    if compiles:
        compile(evaluating, backend="eager")(model, optimizer, X)
    else:
        data_parallel(model)
        evaluating(model, optimizer, X)


def cut_along_data(compiles: bool) -> None:
    model = mlp()
    shard_module(model, {"0.weight": "[dp, -]", "0.bias": "[dp]"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (compile(good, backend="eager") if compiles else good)(model, optimizer, X)


CASES: dict[str, Case] = {
    "a parameter that is cut along the data axis": Case(
        lambda: cut_along_data(compiles=True),
        {"train with data_parallel, which knows such parameters": lambda: cut_along_data(compiles=False)},
        mesh="dp=2",
    ),
    "no such backend": Case(
        lambda: compile(good, backend="none"),  # type: ignore[arg-type]
        {'backend="inductor"': lambda: compile(good, backend="inductor")},
        mesh="dp=2",
    ),
    "a plan for two modules": Case(
        lambda: of_two(sharded=False), {"call shard_module(module, plan) for each": lambda: of_two(sharded=True)}, 2
    ),
    "LBFGS": Case(
        lambda: again(compiles=True),
        {"train with data_parallel and LBFGS": lambda: again(compiles=False)},
        mesh="dp=2",
    ),
    "nothing to explain": Case(
        lambda: compile(good, backend="eager").explain(),
        {"call it once, then explain it": lambda: run(good).explain()},
        mesh="dp=2",
    ),
    "a value is read": Case(
        lambda: run(reading),
        {"compute with tensors (torch.where)": lambda: run(choosing)},
        mesh="dp=2",
    ),
    "an error of the step": Case(
        lambda: run(breaking),
        {"run it once without compile()": lambda: run(good)},
        mesh="dp=2",
    ),
    "samples depend on each other": Case(
        lambda: run(over_samples),
        {
            "compute it from values of one sample each": lambda: run(of_each_sample),
            "train with data_parallel or fully_shard": lambda: [
                eagerly(over_samples, data_parallel),
                eagerly(over_samples, fully_shard),
            ],
        },
        mesh="dp=2",
    ),
    "a loop over samples": Case(
        lambda: run(looping),
        {"do not loop over samples": lambda: run(of_each_sample)},
        mesh="dp=2",
    ),
    "a replaced parameter": Case(
        lambda: run(replacing),
        {"change its values in place, as with copy_()": lambda: run(filling)},
        mesh="dp=2",
    ),
    "a changed hyperparameter": Case(
        lambda: run(slowing), {"call the scheduler after the compiled step": scheduled}, mesh="dp=2"
    ),
    "an optimizer of elsewhere": Case(
        lambda: foreign(passes=False), {"pass it to the compiled function": lambda: foreign(passes=True)}, mesh="dp=2"
    ),
    "no module": Case(
        lambda: without(of_head=False), {"pass the model to the compiled function": lambda: run(good)}, mesh="dp=2"
    ),
    "a module is missing": Case(
        lambda: without(of_head=True), {"pass every module whose parameters the step trains": with_head}, mesh="dp=2"
    ),
    "other numbers of samples": Case(
        lambda: pair(4, 3), {"pass as many samples in each": lambda: [pair(4, 4), pair(4, 4, dim=1)]}, mesh="dp=2"
    ),
    "no samples": Case(lambda: pair(0, 0), {"pass as many samples in each": lambda: pair(4, 4)}, mesh="dp=2"),
    "a module that has changed": Case(
        lambda: changed(resets=False), {"call reset() on the compiled step": lambda: changed(resets=True)}, mesh="dp=2"
    ),
    "gradients are there": Case(
        lambda: run(adding, calls=2),
        {
            "call optimizer.zero_grad() in the step before backward, or before each call": lambda: [
                run(good, calls=2),
                dropping_outside(),
            ]
        },
        mesh="dp=2",
    ),
}
