"""The train steps of torch's tests of `_spmd`, compiled for data-parallel ranks, train as DistributedDataParallel."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import FULL
from spmd_steps import STYLES, compiled, needs_a_compiler, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SGD = ({"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "foreach": True})
ROWS = 128 if FULL else 16


class SimpleMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(50, 32)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(32, 8)

    def forward(self, x):
        return torch.sigmoid(self.net2(self.relu(self.net1(x))))


class Reshaping(nn.Module):
    """Its operations move the dim of the samples, and make tensors of their number."""

    def __init__(self):
        super().__init__()
        self.mlp = SimpleMLP()

    def forward(self, x):
        output = self.mlp(x)
        squeezed = output.clone().view(-1).squeeze()
        output = output + 0.1 * squeezed.unsqueeze(0).view(output.shape[0], -1)
        arange = torch.arange(output.shape[1], device=output.device)
        added = arange.unsqueeze(0) + torch.ones(output.shape, device=output.device)
        zeros = torch.zeros(output.shape[1], device=output.device)
        return output + added + zeros.unsqueeze(0).repeat(output.shape[0], 1)


class Columns(nn.Module):
    """Takes its samples in dim 1."""

    def __init__(self):
        super().__init__()
        self.mlp = SimpleMLP()

    def forward(self, x):
        return self.mlp(x.t().contiguous()).t()


def train_step(model, optim, train_batch):
    def loss_fn(out, labels):
        return (out - labels).sum()

    optim.zero_grad()
    inputs, labels = train_batch
    loss = loss_fn(model(inputs), labels)
    loss.backward()
    optim.step()
    return loss


def against_ddp(
    style: str,
    build: Any,
    cls: Any,
    options: dict[str, Any],
    *,
    warm: bool = False,
    dim: int = 0,
    backend: str = "eager",
) -> None:
    torch.manual_seed(0)
    module = build()
    ddp = DDP(deepcopy(module))
    optimizer, other = cls(module.parameters(), **options), cls(ddp.parameters(), **options)
    run = compiled(train_step, style, input_batch_dim=dim, backend=backend)
    if warm:  # as torch's test must: on batches that are equal on all ranks
        batch = torch.randn(ROWS, 50), torch.randn(ROWS, 8)
        batch = (batch[0].t(), batch[1].t()) if dim else batch
        train_step(module, optimizer, batch)
        train_step(ddp, other, batch)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        batch = torch.randn(ROWS, 50), torch.randn(ROWS, 8)
        batch = (batch[0].t().contiguous(), batch[1].t().contiguous()) if dim else batch
        loss, mean = run(module, optimizer, batch), train_step(ddp, other, batch).detach()
        dist.all_reduce(mean)
        torch.testing.assert_close(loss, mean, rtol=1e-4, atol=1e-3)  # of a sum over samples
        for p, q in zip(module.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(whole(p).detach(), q.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-5)
    assert run.compiles == 1


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("options", SGD, ids=("plain", "momentum", "foreach"))
@pytest.mark.parametrize("style", STYLES)
def test_sgd(world, style, options, warm):
    world(against_ddp, 2, style=style, build=SimpleMLP, cls=torch.optim.SGD, options=options, warm=warm)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_fused_adam(world, style, warm):
    options = {"lr": 0.1, "fused": True}
    world(against_ddp, 2, style=style, build=SimpleMLP, cls=torch.optim.Adam, options=options, warm=warm)


@pytest.mark.parametrize("style", STYLES)
def test_operations_that_move_the_batch_dim(world, style):
    world(against_ddp, 2, style=style, build=Reshaping, cls=torch.optim.SGD, options={"lr": 0.1})


@pytest.mark.parametrize("style", STYLES)
def test_samples_in_dim_1(world, style):
    options = {"lr": 0.1, "fused": True}
    world(against_ddp, 2, style=style, build=Columns, cls=torch.optim.Adam, options=options, dim=1)


@needs_a_compiler
@pytest.mark.parametrize("style", STYLES if FULL else STYLES[1:])
def test_compiled_by_inductor(world, style):
    world(
        against_ddp, 2, timeout_s=300, style=style, build=SimpleMLP, cls=torch.optim.Adam,
        options={"lr": 0.1, "fused": True}, backend="inductor",
    )  # fmt: skip
