"""A dense model beside its fully sharded copy: the oracle of the tests in this folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from harness import FULL, device
from torch import nn

from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard

WORLDS = [1, 2, 3, 4] if FULL else [1, 3]
"""Sizes of worlds that tests run in."""

LOCAL = 2
"""Samples of a rank."""


class Block(nn.Module):
    """A residual block of uneven sizes."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head, which may be one tensor."""

    def __init__(self, width: int = 5, depth: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 7, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def net(seed: int = 0, *, make: Callable[..., nn.Module] = Net, **options: Any) -> Any:
    """A model with the same values on every rank, of float64; `options` are those of `make`."""
    torch.manual_seed(seed)
    return make(**options).double().to(device())


def shard(model: Any, **options: Any) -> Any:
    """Each block a unit, and the rest one; `options` are those of `fully_shard`."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def twins(make: Callable[..., nn.Module] = Net, *, tied: bool = False, **options: Any) -> tuple[Any, Any]:
    """A dense model and a fully sharded copy; `options` are those of `fully_shard`."""
    dense = net(make=make, **({"tied": True} if tied else {}))
    return dense, shard(copy.deepcopy(dense), **options)


def ids_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step, and this rank's part of it."""
    group = as_group()
    whole = torch.randint(0, 7, (group.size * LOCAL, 3), generator=torch.Generator().manual_seed(step)).to(device())
    return whole, whole[group.index * LOCAL :][:LOCAL]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss that depends on every element."""
    return output.double().logsumexp(-1).pow(2).mean()


def both_backward(dense: nn.Module, sharded: nn.Module, step: int = 0) -> None:
    """One forward and backward of both."""
    whole, part = ids_of(step)
    loss_of(dense(whole)).backward()
    loss_of(sharded(part)).backward()


def backward(dense: nn.Module, sharded: nn.Module, step: int = 0) -> None:
    """The same, and a comparison of the gradients."""
    both_backward(dense, sharded, step)
    same_gradients(dense, sharded)


def train(dense: nn.Module, sharded: nn.Module, optimizers: Iterable[Any], steps: int = 2, first: int = 0) -> None:
    """Steps of both, and a comparison after each."""
    optimizers = list(optimizers)
    for step in range(first, first + steps):
        backward(dense, sharded, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_values(dense, sharded)


def same_gradients(dense: nn.Module, sharded: nn.Module, tolerance: float = 1e-5, factor: float = 1.0) -> None:
    """Demand gradients equal to `factor` times the dense ones, and None where they are."""
    _compare(dense, sharded, lambda p: p.grad, tolerance, factor)


def same_values(dense: nn.Module, sharded: nn.Module, tolerance: float = 1e-5) -> None:
    """Demand parameters equal to the dense ones, under the same names."""
    _compare(dense, sharded, lambda p: p.detach(), tolerance)


def _compare(
    dense: nn.Module, sharded: nn.Module, of: Callable[[Any], Any], tolerance: float, factor: float = 1.0
) -> None:
    pairs = zip(dense.named_parameters(), sharded.named_parameters(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        want, found = of(one), of(other)
        assert (want is None) == (found is None), (name, want, found)
        if want is not None:
            want = want if factor == 1 else want * factor
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            assert found.dtype == want.dtype, (name, found.dtype)
            torch.testing.assert_close(
                found, want, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )
