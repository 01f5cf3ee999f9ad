"""Whatever the step: a compiled one has the dense result, or is refused with the user's line. Never a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
import torch
from batch_cases import CASES, Case
from batch_law import Step, Weights, assert_dense, collectives, compiled, refusal
from harness import FULL
from torch import Tensor, nn
from torch.nn import functional as F

from shardtensor.spmd.compiled import CompiledStep

SPREADS = [
    ([3, 1], 0, "mean"),
    ([2, 2], 0, "sum"),
    ([1, 2, 3], 0, "sum"),
    ([1, 2, 1], 1, "mean"),
    ([1, 1, 1], 0, "mean"),
]
"""The samples of each rank, the dim that has them, the reduction of the loss."""


def _batch(case: Case, total: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((total, *case.sample), generator=generator, dtype=torch.double)
    y = torch.randint(0, 5, (total, *case.y), generator=generator)
    if dim == 1:
        return [x.transpose(0, 1).contiguous(), (y.transpose(0, 1) if case.y else y.expand(3, -1)).contiguous()]
    return [x, y]


def _step(case: Case, dim: int, reduction: str) -> Step:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        h = x * model.a + model.b
        if dim == 1 and not case.any_dim:
            h = h.transpose(0, 1)
        if dim == 1:
            y = y.transpose(0, 1) if case.y else y[0]
        out = case.run(h, model.w, y)
        loss = getattr(out * out, reduction)()
        loss.backward()
        optimizer.step()
        return loss, out

    return step


def _model(case: Case, dim: int) -> Callable[[], nn.Module]:
    shape = (1, *case.sample) if dim == 0 else (case.sample[0], 1, *case.sample[1:])
    return lambda: Weights(a=shape, b=shape, w=case.w)


def _chosen() -> list[Any]:
    """An eighth of the cases in one spread, in turns; all in all of them in a full run."""
    return [
        pytest.param(name, spread, id=f"{name}-{spread}")
        for name in CASES
        for spread in range(len(SPREADS))
        if FULL or spread == crc32(name.encode()) % (8 * len(SPREADS))
    ]


@pytest.mark.parametrize(("name", "spread"), _chosen())
def test_an_operation_is_dense_or_refused(name, spread):
    case, (parts, dim, reduction) = CASES[name], SPREADS[spread]
    step, make, batch = _step(case, dim, reduction), _model(case, dim), _batch(case, sum(parts), dim)
    if case.is_refused:
        text = refusal(step, make, batch, parts, dim)
        assert case.why in text and ".py:" in text and ("fix" in text or "either" in text)
    else:
        assert_dense(step, make, batch, parts, dim, tolerance=case.tolerance)


# -- steps ------------------------------------------------------------------------------------------------------------


def _x(samples: int = 4) -> list[Tensor]:
    return [torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)]


def _weights() -> nn.Module:
    return Weights(a=(6,), w=(6, 3))


def _two_losses(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Step:
    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        one, two = first((x * model.a) @ model.w), second((x + model.a) @ model.w)
        one.backward()
        two.backward()
        optimizer.step()
        return one, two

    return step


def _penalty(model: Any, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    x = x.detach().requires_grad_()
    h = ((x * model.a) @ model.w).tanh()
    (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    loss = h.square().mean() + (grad.norm(dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def _grad_of_weights(model: Any, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    loss = ((x * model.a) @ model.w).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = loss + sum(g.square().sum() for g in grads)
    total.backward()
    optimizer.step()
    return total


def _clipped(**options: Any) -> Step:
    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = ((x * model.a) @ model.w).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)
        optimizer.step()
        return loss, norm

    return step


def _weights_after(model: Any, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    loss = ((x * model.a) @ model.w).square().mean()
    loss.backward()
    optimizer.step()
    return loss, ((x * model.a) @ model.w).square().mean(), model.w.square().sum()


def _two_steps(model: Any, optimizer: Any, x: Tensor) -> Any:
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = ((x * model.a) @ model.w).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def _scaled_gradients(model: Any, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    loss = ((x * model.a) @ model.w).square().mean()
    (loss * 8).backward()
    for param in model.parameters():
        param.grad.div_(8)
    optimizer.step()
    return loss


STEPS: dict[str, Step] = {
    "two means": _two_losses(lambda h: h.square().mean(), lambda h: h.tanh().mean()),
    "two sums": _two_losses(lambda h: h.square().sum(), lambda h: h.tanh().sum()),
    "a sum and a mean": _two_losses(lambda h: h.square().sum(), lambda h: h.tanh().mean()),
    "a gradient penalty": _penalty,
    "gradients of weights in the loss": _grad_of_weights,
    "clipped": _clipped(foreach=False),
    "clipped by lists": _clipped(foreach=True),
    "clipped by the largest": _clipped(norm_type=float("inf")),
    "weights after the step": _weights_after,
    "two steps": _two_steps,
    "gradients scaled": _scaled_gradients,
}


@pytest.mark.parametrize("parts", [[1, 2, 1]] + [[2, 2], [1, 3]] * FULL, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_dense(name, parts):
    assert_dense(STEPS[name], _weights, _x(), parts)


LOSSES: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], bool]] = {
    "mean": (lambda m, h, x: h.square().mean(), False),
    "sum": (lambda m, h, x: h.square().sum(), True),
    "sum over size": (lambda m, h, x: h.square().sum() / len(x), False),
    "mean times size": (lambda m, h, x: 3 * h.square().mean() * len(x), True),
    "masked mean": (lambda m, h, x: (h * (x[:, :3] > 0)).sum() / (x[:, :3] > 0).sum().clamp(min=1), False),
    "masked mean of floats": (lambda m, h, x: (h * x[:, :3]).sum() / (x[:, :3].abs().sum() + 1e-3), False),
    "mean of the batch's statistics": (lambda m, h, x: F.batch_norm(h, None, None, training=True).tanh().mean(), False),
    "sum of the batch's statistics": (lambda m, h, x: F.batch_norm(h, None, None, training=True).tanh().sum(), True),
    "sum of a softmax over samples": (lambda m, h, x: (h * h.softmax(0)).sum(), False),
    "log of a sum": (lambda m, h, x: h.exp().sum().log(), False),
    "logsumexp of each": (lambda m, h, x: (h - h.logsumexp(0)).square().sum(), True),
    "normalized by the batch": (lambda m, h, x: (h / h.norm()).tanh().sum(), True),
}


@pytest.mark.parametrize("parts", [[1, 2, 1]] + [[2, 2]] * FULL, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_sums_are_divided_by_the_number_of_ranks_and_no_others(name, parts):
    loss, is_sum = LOSSES[name]

    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        found = loss(model, (x * model.a) @ model.w, x)
        found.backward()
        return found

    model = _weights()
    step(model, torch.optim.SGD(model.parameters(), 0.1), *_x())
    for _, grads, _ in compiled(step, _weights, _x(), parts, reduce_op="mean"):
        for got, param in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(got, param.grad / (len(parts) if is_sum else 1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("parts", [[2, 2], [1, 3]], ids=str)
def test_a_regulariser_of_weights_is_not_divided(parts):
    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = ((x * model.a) @ model.w).square().sum() + 0.5 * model.w.square().sum()
        loss.backward()
        return loss

    def other(model: Any, optimizer: Any, x: Tensor) -> Any:
        loss = ((x * model.a) @ model.w).square().sum() / len(parts) + 0.5 * model.w.square().sum()
        loss.backward()

    model = _weights()
    other(model, None, *_x())
    for _, grads, _ in compiled(step, _weights, _x(), parts, reduce_op="mean"):
        for got, param in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(got, param.grad, rtol=1e-9, atol=1e-11)


def test_a_loss_that_is_neither_a_sum_nor_a_mean_is_refused_where_sums_are_averaged():
    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        h = (x * model.a) @ model.w
        loss = h.sum() + h.mean()
        loss.backward()
        return loss

    with pytest.raises(AssertionError, match="not refused"):
        refusal(step, _weights, _x(), [2, 2])
    assert "averaged over ranks" in refusal(step, _weights, _x(), [2, 2], reduce_op="mean")


# -- collectives ------------------------------------------------------------------------------------------------------


def _sent(step: Step, make: Callable[[], nn.Module], batch: list[Tensor], parts: list[int], **kwargs: Any) -> int:
    found: list[CompiledStep] = []
    compiled(step, make, batch, parts, found=found, **kwargs)
    return collectives(found[0]).count("all_reduce")


def _train(model: Any, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def _train_sum(model: Any, optimizer: Any, x: Tensor) -> Any:
    optimizer.zero_grad()
    loss = model(x).square().sum() + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    return loss


class _Attention(nn.Module):
    """A layer with one projection for queries, keys and values, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(6, 18), nn.Linear(6, 6), nn.LayerNorm(6)
        self.positions = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None] + self.positions
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, 3)).movedim(-3, 0).transpose(-2, -3)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)) + h


class _Tied(nn.Module):
    """A weight that is used three times: once whole, once cut and joined again, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.w.chunk(2)
        h = F.linear(x, self.w).tanh() @ torch.cat([b * 2, a[:, [1, 0, 2, 3, 4, 5]]])
        return h @ self.w.t().tril() + F.pad(self.w[:3], (0, 0, 1, 2))[1]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("parts", [[3, 1]] + [[2, 2]] * FULL, ids=str)
@pytest.mark.parametrize("step", [_train, _train_sum])
@pytest.mark.parametrize("model", [_mlp, _Attention, _Tied])
@pytest.mark.parametrize("reduce_op", ["mean"] + ["sum"] * FULL)
def test_only_the_loss_and_the_buckets_are_reduced(model, step, parts, reduce_op):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return model().double()

    assert _sent(step, make, _x(), parts, reduce_op=reduce_op) == 2
    if reduce_op == "sum":
        assert_dense(step, make, _x(), parts)


def test_a_value_that_is_used_twice_is_reduced_once():
    def step(model: Any, optimizer: Any, x: Tensor) -> Any:
        total = (x * model.a).sum(0).detach()
        return (total * total).sum() + total.exp().sum()

    assert _sent(step, _weights, _x(), [2, 2]) == 1
    assert_dense(step, _weights, _x(), [2, 2])
