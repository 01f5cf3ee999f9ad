"""What the host pays for a step of fully sharded layers: eight linear layers, each sharded by itself, AdamW fused.

One process on torch's fake process group of four ranks: microseconds of a step, and the ratio to plain torch. Layers of
width 160 are gathered again in backward; those of width 64 have less than 64 KiB and stay gathered.

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


def model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


def sharded(width: int, shard: Callable[..., Any]) -> nn.Sequential:
    module = model(width)
    for layer in module:
        shard(layer)
    shard(module)
    return module


def step_of(width: int, module: nn.Module, optimizer: Any) -> Callable[[], None]:
    x = torch.randn(4, width)

    def step() -> None:
        module(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ways_of(width: int) -> dict[str, Callable[[], None]]:
    adamw = partial(torch.optim.AdamW, fused=True)
    theirs = partial(fully_shard, mesh=init_device_mesh("cpu", (WORLD,)))
    plain, stock, own, peer = (
        model(width),
        sharded(width, st.fully_shard),
        sharded(width, st.fully_shard),
        sharded(width, theirs),
    )
    return {
        "plain torch": step_of(width, plain, adamw(plain.parameters())),
        "shardtensor, torch's AdamW": step_of(width, stock, adamw(stock.parameters())),
        "shardtensor, ShardedOptimizer": step_of(width, own, st.ShardedOptimizer(own, adamw)),
        "FSDP2": step_of(width, peer, adamw(peer.parameters())),
    }


def main() -> None:
    args = start(__doc__)
    rows = []
    for width in (64, 160):
        found = medians_us(ways_of(width), args)
        least = found["plain torch"]
        rows += [
            {"width": width, "way": way, "us a step": round(us), "to plain": round(us / least, 2)}
            for way, us in found.items()
        ]
    write("fully_shard_host", rows)


if __name__ == "__main__":
    main()
