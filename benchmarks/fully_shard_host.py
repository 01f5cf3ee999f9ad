"""What the host pays for a step of fully sharded layers: eight Linear(64, 64), each a unit, AdamW fused.

One process on torch's fake process group of four ranks. Told are microseconds of a step, and the ratio to plain torch.

    python benchmarks/fully_shard_host.py [--rounds 60]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pretended import WORLD, medians_us, start
from report import write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardtensor as st


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def sharded(shard: Callable[..., Any]) -> nn.Sequential:
    module = model()
    for layer in module:
        shard(layer)
    shard(module)
    return module


def step_of(module: nn.Module, optimizer: Any) -> Callable[[], None]:
    x = torch.randn(4, 64)

    def step() -> None:
        module(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    args = start(__doc__)
    adamw = partial(torch.optim.AdamW, fused=True)
    mesh = init_device_mesh("cpu", (WORLD,))
    plain, stock, own, theirs = (
        model(),
        sharded(st.fully_shard),
        sharded(st.fully_shard),
        sharded(partial(fully_shard, mesh=mesh)),
    )
    ways = {
        "plain torch": step_of(plain, adamw(plain.parameters())),
        "shardtensor, torch's AdamW": step_of(stock, adamw(stock.parameters())),
        "shardtensor, ShardedOptimizer": step_of(own, st.ShardedOptimizer(own, adamw)),
        "FSDP2": step_of(theirs, adamw(theirs.parameters())),
    }
    found = medians_us(ways, args)
    least = found["plain torch"]
    write(
        "fully_shard_host",
        [{"way": way, "us a step": round(us), "to plain": round(us / least, 2)} for way, us in found.items()],
    )


if __name__ == "__main__":
    main()
