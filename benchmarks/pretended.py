"""One process on torch's fake process group of four ranks, whose collectives return at once: what the host pays."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 4


def start(description: str | None) -> argparse.Namespace:
    """Read the command line and make the group; one thread."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=50, help="steps in a row, in each round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # collectives leave their results as the memory was: denormal numbers would be slow
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    return args


def medians_us(
    ways: dict[str, Callable[[], Any]], args: argparse.Namespace, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """The median over the rounds of each way's microseconds a step; all take turns in every round.

    Args:
        before: is called, untimed, before each way's steps of a round.
    """
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, step in ways.items():
            before()
            begun = time.perf_counter()
            for _ in range(args.repeats):
                step()
            spent[name].append((time.perf_counter() - begun) / args.repeats * 1e6)
    return {name: statistics.median(found) for name, found in spent.items()}
