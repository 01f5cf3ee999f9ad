"""Estimated seconds of collectives beside measured ones: by the packaged profile, and by one measured just before.

Eight cases, each kind of collective at two sizes that no profile was measured at; and the collectives of small whole
steps, counted by `count_bytes`, beside the time that the step takes longer than the same without communication.

    python benchmarks/estimates.py [--world 4] [--hardware h100] [--profile FILE]

--profile FILE keeps the measured profile, or takes one that is there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import spawn, wait
from report import write
from torch import nn

import shardtensor as st
from shardtensor.cli.calibrate import measure, measure_profile
from shardtensor.comm.process_group import as_group
from shardtensor.cost.profile import KINDS, Profile, read_profile
from shardtensor.cost.seconds import seconds

MIB = 1 << 20
SIZES = {"cuda": (6 * MIB, 96 * MIB), "cpu": (3 * MIB // 2, 12 * MIB)}
PLAN = {"0": st.colwise("tp"), "2": st.rowwise("tp")}


def cases(device: torch.device) -> list[tuple[str, float, float]]:
    """Name, bytes that a rank receives, measured seconds."""
    group = as_group(None)
    found = []
    for kind in KINDS:
        for size in SIZES[device.type]:
            received, took = measure(kind, size, group)
            found.append((f"{kind} {size / MIB:g} MiB", received, took))
    return found


def mlp(width: int, hidden: int, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).to(device, dtype)


def step_of(module: nn.Module, tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    grad = torch.ones_like(x)

    def step() -> None:
        module(x).backward(grad)
        module.zero_grad()
        x.grad = None

    return step


def slowest_median(step: Callable[[], Any], device: torch.device, rounds: int = 15) -> float:
    for _ in range(3):
        step()
    times = []
    for _ in range(rounds):
        dist.barrier()
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        times.append(time.perf_counter() - start)
    told = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.item()


def steps(args: argparse.Namespace, device: torch.device) -> list[tuple[str, float, Any]]:
    """Name, seconds that communication makes a step longer, what the step sends."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width, hidden, each = (4096, 14336, (1024, 8192)) if device.type == "cuda" else (256, 1024, (512, 4096))
    found = []
    for tokens in each:
        sharded = st.shard_module(mlp(width, hidden, device, dtype), PLAN)
        floor = mlp(width, hidden // args.world, device, dtype)
        took = slowest_median(step_of(sharded, tokens, width, device, dtype), device)
        least = slowest_median(step_of(floor, tokens, width, device, dtype), device)

        def counted(tokens: int = tokens) -> None:
            with torch.device("meta"):
                module = st.shard_module(mlp(width, hidden, torch.device("meta"), dtype), PLAN)
                step_of(module, tokens, width, torch.device("meta"), dtype)()

        traffic = st.count_bytes(f"tp={args.world}", counted)
        found.append((f"step of an MLP, {tokens} tokens", took - least, traffic))
    return found


def estimated(traffic: Any, world: int, profile: Profile) -> float:
    return sum(
        line.calls * seconds(line.collective, line.received_bytes / line.calls, world, profile)
        for line in traffic.lines
        if line.collective in KINDS  # and not what ranks tell each other when a module is sharded
    )


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: measure, and on the first print and write."""
    packaged = read_profile(args.hardware or ("h100" if device.type == "cuda" else "cpu"))
    if args.profile and Path(args.profile).exists():
        measured = read_profile(Path(args.profile))
    else:
        measured = measure_profile(args.world)
    table = []
    for name, received, took in cases(device):
        kind = name.split()[0]
        guesses = [seconds(kind, received, args.world, profile) for profile in (packaged, measured)]
        table.append(row(name, took, *guesses))
    for name, took, traffic in steps(args, device):
        table.append(row(name, took, *(estimated(traffic, args.world, profile) for profile in (packaged, measured))))
    if dist.get_rank() == 0:
        if args.profile:
            Path(args.profile).write_text(measured.as_text())
        write("estimates" + ("_gpu" if device.type == "cuda" else ""), table, world=args.world, hardware=packaged.name)


def row(name: str, took: float, packaged: float, measured: float) -> dict[str, Any]:
    return {
        "case": name,
        "measured us": round(1e6 * took, 1),
        "estimated us": round(1e6 * packaged, 1),
        "ratio": round(packaged / took, 2),
        "calibrated us": round(1e6 * measured, 1),
        "calibrated ratio": round(measured / took, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument("--world", type=int, default=min(count, 4) or 2)
    parser.add_argument("--hardware", default="")
    parser.add_argument("--profile", default="")
    spawn(run, parser.parse_args())


if __name__ == "__main__":
    main()
