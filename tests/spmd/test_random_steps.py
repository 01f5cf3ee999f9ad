"""Random steps: a few operations on a batch and weights, in one process and on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from batch_law import Step, Weights, assert_dense
from harness.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shardtensor.errors import RuleError

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.tanh,
    torch.relu,
    lambda x: -x,
    lambda x: x * 2 + 1,
    lambda x: x.square(),
    lambda x: x.mean(0, keepdim=True).expand_as(x),
    lambda x: x.sum(0, keepdim=True) * torch.ones_like(x),
    lambda x: x - x.mean(0),
    lambda x: x / len(x) + 0.5,
    lambda x: x * x.shape[0],
    lambda x: x.softmax(-1),
    lambda x: x.softmax(0),
    lambda x: x / (x.norm() + 1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x - x.amax(0),
    lambda x: x.flip(-1),
    lambda x: x.cumsum(-1),
    lambda x: x.t().contiguous().t(),
    lambda x: x.t().flatten().view(x.shape[1], -1).t(),
    lambda x: x.flatten().view(-1, x.shape[1]),
    lambda x: x.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1).view(-1, 2, x.shape[1]).sum(1),
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: x.detach(),
    lambda x: F.dropout(x, 0.0),
    lambda x: x.masked_fill(x > 0.5, 0.1),
    lambda x: x * (torch.arange(x.shape[0]) + 1)[:, None],
    lambda x: x[torch.arange(x.shape[0])],
    lambda x: x.repeat(2, 1)[: len(x)],
    lambda x: x.sort(0).values,
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x - y.mean(0),
    lambda x, y: x + y.sum(0),
    lambda x, y: torch.where(x > y, x, y * 2),
    lambda x, y: x @ (y.t() @ y) / len(x),
    lambda x, y: torch.cat([x, y], 1)[:, 1:7],
    lambda x, y: x * y.std(),
    lambda x, y: torch.stack([x, y]).mean(0),
    lambda x, y: x * y.mean(0) + y.amin(0),
    lambda x, y: torch.maximum(x, y),
]
WEIGHTED: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: x @ w,
    lambda x, w: x @ w.t().tanh(),
    lambda x, w: x * w[0],
    lambda x, w: x + w.sum(0),
    lambda x, w: F.layer_norm(x, (6,), w[1]),
    lambda x, w: F.batch_norm(x, None, None, w[2], w[3], True),
    lambda x, w: (x.sum(0) + w[4]) * x,
    lambda x, w: (x.mean(0) @ w).tanh() + x,
]
REDUCED: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: x.mean(),
    lambda x, w: x.sum(),
    lambda x, w: x.square().mean() + 0.1 * w.square().sum(),
    lambda x, w: x.square().sum() + w.sum(),
    lambda x, w: F.mse_loss(x, x.detach().roll(1, -1)),
    lambda x, w: F.cross_entropy(x, x.detach().argmin(-1)),
    lambda x, w: x.sum(1).exp().mean().log(),
    lambda x, w: (x * (x > 0)).sum() / (x > 0).sum().clamp(min=1),
    lambda x, w: x.norm() + x.mean() * x.sum(),
    lambda x, w: x.logsumexp(0).mean(),
    lambda x, w: x.mean(0).square().sum() + x.sum() / x.numel(),
]
OPERATIONS = st.one_of(
    st.tuples(st.just(UNARY), st.integers(0, len(UNARY) - 1)),
    st.tuples(st.just(BINARY), st.integers(0, len(BINARY) - 1)),
    st.tuples(st.just(WEIGHTED), st.integers(0, len(WEIGHTED) - 1)),
)


def _step(operations: list[tuple[Any, int, int, int]], reduced: int, dim: int) -> Step:
    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        values = [(x.t() if dim else x) @ model.a]
        for kind, number, one, two in operations:
            h = values[one % len(values)]
            if kind is UNARY:
                values.append(kind[number](h))
            else:
                values.append(kind[number](h, model.w if kind is WEIGHTED else values[two % len(values)]))
        loss = REDUCED[reduced](values[-1] + values[0], model.w)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _model() -> nn.Module:
    return Weights(a=(6, 6), w=(6, 6))


@given(
    operations=st.lists(st.tuples(OPERATIONS, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    reduced=st.integers(0, len(REDUCED) - 1),
    parts=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    dim=st.integers(0, 1),
)
@examples(200)
def test_a_random_step_is_dense_or_refused(operations, reduced, parts, dim):
    step = _step([(*operation, one, two) for operation, one, two in operations], reduced, dim)
    x = torch.randn(sum(parts), 6, generator=torch.Generator().manual_seed(2), dtype=torch.double)
    try:
        assert_dense(step, _model, [x.t().contiguous() if dim else x], parts, dim, tolerance=1e-8)
    except RuleError as error:
        assert "\n  at " in str(error) and ".py:" in str(error)  # noqa: PT017
