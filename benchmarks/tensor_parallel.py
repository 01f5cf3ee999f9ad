"""What a tensor-parallel MLP costs the host: a column-parallel and a row-parallel Linear, forward and backward.

One process on torch's fake process group of four ranks, whose collectives return at once; sizes are so small that the
host's work is all there is. Beside `shard_module`: the local computation with no communication (the floor), a pair of
autograd functions around it written by hand, and DTensor. All ways take turns in every round; told are medians.

    python benchmarks/tensor_parallel.py [--rounds 60]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtensor as st

WORLD, TOKENS, WIDTH, HIDDEN = 4, 4, 16, 32


class Copied(torch.autograd.Function):
    """Nothing forward; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """The sum over the ranks forward; nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class ByHand(nn.Module):
    """This rank's part of the MLP, with or without what the ranks tell each other."""

    def __init__(self, communicates: bool) -> None:
        super().__init__()
        self.communicates = communicates
        self.up = nn.Linear(WIDTH, HIDDEN // WORLD, bias=False)
        self.down = nn.Linear(HIDDEN // WORLD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.communicates:
            return self.down(F.gelu(self.up(x)))
        return Summed.apply(self.down(F.gelu(self.up(Copied.apply(x)))))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False))


def step(module: nn.Module, x: torch.Tensor) -> None:
    module(x).sum().backward()
    for param in module.parameters():
        param.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=50, help="steps in a row, in each round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ways = {
        "no communication": ByHand(False),
        "by hand": ByHand(True),
        "shardtensor": st.shard_module(mlp(), {"0": st.colwise("tp"), "2": st.rowwise("tp")}),
        "shardtensor, no flows": st.shard_module(mlp(), {"0.weight": "[tp, -]", "2.weight": "[-, tp]"}),
        "DTensor": parallelize_module(mlp(), init_device_mesh("cpu", (WORLD,)), styles),
    }
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, module in ways.items():
            start = time.perf_counter()
            for _ in range(args.repeats):
                step(module, x)
            spent[name].append((time.perf_counter() - start) / args.repeats * 1e6)
    medians = {name: statistics.median(found) for name, found in spent.items()}
    floor, hand = medians["no communication"], medians["by hand"]
    write(
        "tensor_parallel",
        [
            {
                "way": name,
                "us a step": round(us, 1),
                "to the floor": round(us / floor, 2),
                "to hand": round(us / hand, 2),
            }
            for name, us in medians.items()
        ],
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
