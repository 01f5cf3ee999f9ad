"""A whole train step of a tensor-parallel MLP on GPUs, captured in a CUDA graph: forward, loss, backward, clip, AdamW.

Beside it the same step eagerly, and DTensor's. Before anything is timed, 50 captured steps with new inputs and a
changing learning rate are compared with 50 eager ones, bit for bit. All ways take turns in every round; told are
medians of steps in a row on the slowest rank, and what a replay costs the host.

    python benchmarks/graphed_step.py [--world 4] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import spawn, wait
from report import write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardtensor as st

RULES = {"0": st.colwise(), "2": st.rowwise()}
Step = Callable[[torch.Tensor, torch.Tensor], Any]


def mlp(width: int, hidden: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        layers = nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False)
    return nn.Sequential(*layers).to(dtype)


def step_of(module: nn.Module, optimizer: Any, clip: Callable[..., Any]) -> Step:
    params = list(module.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()
        clip(params, 1.0)
        optimizer.step()
        return loss

    return step


def trained(device: torch.device, is_captured: bool, steps: int = 50) -> list[torch.Tensor]:
    """Losses and parameters of float32 steps, each with new inputs and another learning rate."""
    module = st.shard_module(mlp(64, 256, device, torch.float32), RULES)
    optimizer = st.ShardedOptimizer(module, partial(torch.optim.AdamW, fused=True), lr=1e-3)
    step = step_of(module, optimizer, st.clip_grad_norm_)
    run = st.graphed_step(step) if is_captured else step
    losses = []
    for i in range(steps):
        generator = torch.Generator().manual_seed(i)
        x, y = (torch.randn(32, 64, generator=generator).to(device) for _ in range(2))
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3 / (1 + i)).item()
        losses.append(run(x, y).detach().clone())
    assert not is_captured or device.type == "cpu" or run.is_captured  # type: ignore[union-attr]
    params = [param.local_tensor() if isinstance(param, st.ShardedTensor) else param for param in module.parameters()]
    found = [torch.stack(losses), *(param.detach().clone() for param in params)]
    if is_captured:
        run.close()  # type: ignore[union-attr]
    return found


def ways_of(width: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    hidden, fused = width * 7 // 2, partial(torch.optim.AdamW, fused=True)
    steps = []
    for _ in range(2):
        module = st.shard_module(mlp(width, hidden, device, dtype), RULES)
        optimizer = st.ShardedOptimizer(module, fused, lr=1e-4)
        steps.append(step_of(module, optimizer, st.clip_grad_norm_))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    theirs = parallelize_module(
        mlp(width, hidden, device, dtype), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    return {
        "DTensor": step_of(theirs, fused(theirs.parameters(), lr=1e-4), nn.utils.clip_grad_norm_),
        "shardtensor": steps[0],
        "shardtensor, captured": st.graphed_step(steps[1]),
    }


def measure(
    ways: dict[str, Step], batch: Any, rounds: int, repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Of each way the median ms of a step, and the us that the host takes to hand one over; of the slowest rank."""
    spent: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for number in range(rounds + 1):
        for name, step in ways.items():
            for _ in range(0 if number else 5):  # a capture takes a few calls
                step(*batch)
            dist.barrier()
            wait(device)
            start = time.perf_counter()
            for _ in range(repeats):
                step(*batch)
            handed_over = time.perf_counter()
            wait(device)
            if number:
                spent[name][0].append((time.perf_counter() - start) / repeats * 1e3)
                spent[name][1].append((handed_over - start) / repeats * 1e6)
    table = torch.tensor([[statistics.median(each) for each in both] for both in spent.values()], device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(spent, table.tolist(), strict=True))


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: compare, measure, and on the first print and write."""
    on_gpu = device.type == "cuda"
    for eager, captured in zip(trained(device, False), trained(device, True), strict=True):
        assert torch.equal(eager, captured), "a captured step gives other numbers than an eager one"
    dtype, width = (torch.bfloat16, 4096) if on_gpu else (torch.float32, 128)
    rows = []
    for tokens in (64, 1024) if on_gpu else (64,):
        ways = ways_of(width, device, dtype)
        batch = [torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2)]
        found = measure(ways, batch, args.rounds, args.repeats, device)
        for name, (ms, us) in found.items():
            ratio = round(ms / found["DTensor"][0], 3)
            rows.append(
                {"tokens": tokens, "way": name, "ms a step": round(ms, 3), "to DTensor": ratio, "host us": round(us, 1)}
            )
        ways["shardtensor, captured"].close()
    if dist.get_rank() == 0:
        print("50 captured steps equal 50 eager ones bit for bit")
        write("graphed_step", rows, world=args.world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=20, help="steps in a row, in each round")
    args = parser.parse_args()
    spawn(run, args)


if __name__ == "__main__":
    main()
