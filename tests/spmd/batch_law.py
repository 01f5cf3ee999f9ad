"""Compiled steps against the same step in one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import shardtensor as st
from shardtensor.comm.process_group import as_group
from shardtensor.errors import RuleError
from shardtensor.spmd.api import compile
from shardtensor.spmd.compiled import CompiledStep
from shardtensor.spmd.local_graph import c10d
from shardtensor.spmd.parallel_mode import DataParallel

Step = Callable[..., Any]


class Weights(nn.Module):
    """Parameters by name."""

    def __init__(self, **shapes: Sequence[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(shapes))
        for name, shape in shapes.items():
            values = torch.randn(tuple(shape), generator=generator, dtype=torch.double)
            setattr(self, name, nn.Parameter(values))


def dense(step: Step, make: Callable[[], nn.Module], batch: Sequence[Tensor]) -> tuple[Any, list[Any], list[Tensor]]:
    """Run a step in one process; return its result, the gradients and the weights after it."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result = step(model, optimizer, *batch)
    return result, [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def compiled(
    step: Step,
    make: Callable[[], nn.Module],
    batch: Sequence[Tensor],
    parts: Sequence[int],
    dim: int = 0,
    reduce_op: Any = "sum",
    found: list[CompiledStep] | None = None,
) -> list[tuple[Any, list[Any], list[Tensor]]]:
    """Run a compiled step on as many simulated ranks as there are parts; return the same from each."""

    def body() -> Any:
        rank = as_group().rank
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        function = compile(step, parallel_mode=DataParallel(input_batch_dim=dim, reduce_op=reduce_op), backend="eager")
        own = [x.split(list(parts), dim)[rank].clone() for x in batch]
        result = function(model, optimizer, *own)
        if found is not None:
            found.append(function)
        return result, [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]

    return st.simulate(len(parts), body)


def assert_dense(
    step: Step,
    make: Callable[[], nn.Module],
    batch: Sequence[Tensor],
    parts: Sequence[int],
    dim: int = 0,
    reduce_op: Any = "sum",
    tolerance: float = 1e-10,
) -> None:
    """Assert that every rank has the dense result, gradients and weights, or its part of the result."""
    expected = dense(step, make, batch)
    start = 0
    for part, (result, grads, weights) in zip(parts, compiled(step, make, batch, parts, dim, reduce_op), strict=True):
        for name, got, want in [("gradient", grads, expected[1]), ("weight", weights, expected[2])]:
            for i, (x, y) in enumerate(zip(got, want, strict=True)):
                assert (x is None) == (y is None), f"{name} {i}"
                if x is not None and y is not None:
                    torch.testing.assert_close(
                        x, y, rtol=tolerance, atol=tolerance, msg=lambda t, n=f"{name} {i}": f"{n}: {t}"
                    )
        mine = result if isinstance(result, tuple | list) else [result]
        whole = expected[0] if isinstance(expected[0], tuple | list) else [expected[0]]
        for x, y in zip(mine, whole, strict=True):
            torch.testing.assert_close(x, _part(y, x, start, part, sum(parts)), rtol=tolerance, atol=tolerance)
        start += part


def _part(whole: Tensor, like: Tensor, start: int, own: int, total: int) -> Tensor:
    """Return the part of a dense result that a rank should have, if it is of that shape."""
    if whole.shape == like.shape:
        return whole
    dim = next(d for d, (a, b) in enumerate(zip(whole.shape, like.shape, strict=True)) if a != b)
    for outer in range(1, whole.shape[dim] + 1):
        if whole.shape[dim] % (outer * total) == 0:
            blocks = whole.unflatten(dim, (outer, total, -1)).narrow(dim + 1, start, own).flatten(dim, dim + 2)
            if blocks.shape == like.shape and torch.allclose(blocks, like):
                return blocks
    inner = whole.shape[dim] // total
    return whole.narrow(dim, start * inner, own * inner)


def refusal(
    step: Step,
    make: Callable[[], nn.Module],
    batch: Sequence[Tensor],
    parts: Sequence[int],
    dim: int = 0,
    reduce_op: Any = "sum",
) -> str:
    """Return the text of the error of a step that is refused."""
    try:
        compiled(step, make, batch, parts, dim, reduce_op)
    except RuleError as error:
        return str(error)
    raise AssertionError("the step was not refused")


def collectives(function: CompiledStep) -> list[str]:
    """Return the names of the collectives of a compiled step."""
    targets = {c10d.all_reduce.default: "all_reduce", c10d.broadcast.default: "broadcast"}
    return [targets[node.target] for node in function._builder.last.local.graph.nodes if node.target in targets]
