"""A small model twice: dense, for the whole batch, and fully sharded, for this rank's part of it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from harness import device
from torch import nn

from shardtensor.comm.process_group import as_group
from shardtensor.fsdp import fully_shard
from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.unit import units_in

LOCAL = 2  # samples of a rank


class Block(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, a head; none of the sizes is a multiple of a number of ranks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(5, 7, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def twins(mesh=None, module=None, **options):
    """The dense one and the sharded one: each block a unit, and the whole."""
    torch.manual_seed(0)
    dense = (Net() if module is None else module()).to(device())
    model = copy.deepcopy(dense)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return dense, fully_shard(model, mesh=mesh, **options)


def batches(step: int, group=None) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, whole and this rank's part."""
    group = group or as_group()
    ids = torch.randint(0, 7, (group.size * LOCAL, 3), generator=torch.Generator().manual_seed(step)).to(device())
    return ids, ids[group.index * LOCAL :][:LOCAL]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).float().logsumexp(-1).pow(2).mean()


def both_backward(dense: nn.Module, model: nn.Module, step: int = 0) -> None:
    ids, mine = batches(step)
    loss_of(dense, ids).backward()
    loss_of(model, mine).backward()


def same_grads(dense: nn.Module, model: nn.Module, factor: float = 1.0, tolerance: float = 1e-5) -> None:
    for (name, p), (_, q) in zip(dense.named_parameters(), model.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            got = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
            torch.testing.assert_close(
                got, p.grad * factor, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def same_values(dense: nn.Module, model: nn.Module) -> None:
    for (name, p), (_, q) in zip(dense.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(
            q.full_tensor(), p, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter]:
    """Count what a model's flats send: gathers from all ranks, reductions, and sums over copies."""
    counts: Counter = Counter()
    flats: list[Flat] = [flat for _, unit in units_in(model) for flat in unit.flats]

    def told(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for flat in flats:
        flat.gather, flat.reduce = told("gather", flat.gather), told("reduce", flat.reduce)
        finish, carry = flat.carry.finish, flat.carry
        if carry.replicate is not None:
            carry.finish = lambda *args, of=finish: _told_of_sum(counts, of(*args))
    try:
        yield counts
    finally:
        for flat in flats:
            del flat.gather, flat.reduce
            vars(flat.carry).pop("finish", None)


def _told_of_sum(counts, scale):
    counts["sum over copies"] += scale is not None
    return scale
