"""Start the demo's ranks with torch elastic, wait for them and judge what they found."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shardtensor.cli.arguments import quiet_processes

if TYPE_CHECKING:
    from shardtensor.cli.demo.train import Outcome


def run_demo(options: argparse.Namespace) -> int:
    """Run ``shardtensor demo``; returns the exit status."""
    from shardtensor.cli.demo.train import TextError, read_text

    try:
        text = read_text(options.text)
    except TextError as error:
        print(f"shardtensor demo: {error}", file=sys.stderr)
        return 2
    device = _device(options.device, options.world)
    if device is None:
        return 2
    console = Console()
    console.print(
        f"{options.world} ranks on {device}, {len(text) / 1e6:.1f} MB of "
        f"{options.text or 'the Python standard library'}, {options.steps} steps, float32; starting ..."
    )
    start = time.perf_counter()
    outcome = _launch(text, options.steps, device, options.world)
    if outcome is None:
        return 1
    return _judge(outcome, console, time.perf_counter() - start)


def _device(wanted: str, world: int) -> str | None:
    import torch

    count = torch.cuda.device_count()
    if wanted == "cuda" and count < world:
        print(
            f"shardtensor demo: {world} ranks need {world} GPUs, this machine has {count}; "
            f"use --world {count} or --device cpu" if count else "shardtensor demo: no GPU here; use --device cpu",
            file=sys.stderr,
        )  # fmt: skip
        return None
    return "cuda" if wanted == "cuda" or (wanted == "auto" and count >= world) else "cpu"


def _launch(text: bytes, steps: int, device: str, world: int) -> Outcome | None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from shardtensor.cli.demo.train import work

    quiet_processes()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failure is printed below, once
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id="shardtensor-demo", max_restarts=0, monitor_interval=0.1, start_method="spawn",
    )  # fmt: skip
    try:
        return elastic_launch(config, work)(text, steps, device)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        told: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {"message": failure.message}
        trace = told.get("extraInfo", {}).get("py_callstack", "")
        print(f"{trace}shardtensor demo: rank {rank} failed: {told['message']}", file=sys.stderr)
        return None


def _judge(outcome: Outcome, console: Console, wall_s: float) -> int:
    from shardtensor.cli.demo.report import TOLERANCE, show_bytes, show_holders, worst_difference

    console.print()
    show_holders(outcome.held, console)
    console.print()
    show_bytes(outcome.bytes_by_rank, outcome.bytes_dense, console)
    steps = len(outcome.sharded)
    step, difference = worst_difference(outcome.sharded, outcome.dense)
    console.print(
        f"\n{steps} steps: loss {outcome.sharded[0]:.4f} -> {outcome.sharded[-1]:.4f}; "
        f"{1e3 * outcome.step_s[0] / steps:.0f} ms a sharded step, {1e3 * outcome.step_s[1] / steps:.0f} ms a dense "
        f"one; {wall_s:.0f} s in all"
    )
    if not difference <= TOLERANCE:
        console.print(
            f"[bold red]The sharded run and the dense run differ[/]: by {difference:.1e} of the loss at step {step} "
            f"({outcome.sharded[step - 1]:.6f} sharded, {outcome.dense[step - 1]:.6f} dense); at most {TOLERANCE:.0e} "
            "is rounding."
        )
        return 1
    console.print(
        f"[bold green]The sharded run and the dense run agree[/]: every loss within {difference:.1e} "
        f"(worst at step {step})."
    )
    console.print(_afterword(outcome), highlight=False)
    return 0


def _afterword(outcome: Outcome) -> str:
    """Why steps took as long as they did, and what to try next."""
    world, cores = len(outcome.bytes_by_rank), os.cpu_count() or 1
    why = ""
    if outcome.step_s[0] > outcome.step_s[1]:
        why = (
            f"\nA sharded step is slower here: the {world} ranks share this machine ({cores} cores) with the dense run,"
            " and this model is so small that the sums between its layers take longer than the work they divide. "
            "Sharding pays where each rank has a device of its own, or where a model does not fit into one.\n"
        )
    return why + (
        "\nNext\n"
        "  shardtensor plan mlp --world 4       bytes of every rank on a machine, before it runs\n"
        "  shardtensor show mlp --world 4       who holds what\n"
        "  shardtensor check llama --help       what is wrong with a plan for your model's config.json"
    )
