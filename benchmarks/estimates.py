"""Estimated seconds of collectives beside measured ones: by the packaged profile, and by one measured just before.

Eight cases, each kind of collective at two sizes that no profile was measured at. On GPUs times are those of the
devices, which run one call after the other while the host is ahead.

    python benchmarks/estimates.py [--world 4] [--hardware h100] [--profile FILE]

--profile FILE keeps the measured profile, or takes one that is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import spawn
from report import write

from shardtensor.cli.calibrate import measure, measure_profile, nearest
from shardtensor.comm.process_group import as_group
from shardtensor.cost.profile import KINDS, read_profile, seconds

MIB = 1 << 20
SIZES = {"cuda": (6 * MIB, 96 * MIB), "cpu": (3 * MIB // 2, 12 * MIB)}


def cases(device: torch.device) -> list[tuple[str, float, float]]:
    """Name, bytes that a rank receives, measured seconds."""
    group = as_group(None)
    found = []
    for kind in KINDS:
        for size in SIZES[device.type]:
            received, took = measure(kind, size, group)
            found.append((f"{kind} {size / MIB:g} MiB", received, took))
    return found


def run(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: measure, and on the first print and write."""
    packaged = read_profile(args.hardware or nearest())
    if args.profile and Path(args.profile).exists():
        measured = read_profile(Path(args.profile))
    else:
        measured = measure_profile(args.world)
    table = []
    for name, received, took in cases(device):
        kind = name.split()[0]
        guesses = [seconds(kind, received, args.world, profile) for profile in (packaged, measured)]
        table.append(row(name, took, *guesses))
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
