"""``shardtensor plan``: the costs of a plan on a machine, before it runs.

Imports torch to count a step, and to calibrate.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from shardtensor.cli.arguments import add_model_arguments, positive
from shardtensor.errors import ShardTensorError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def add_parser(commands: Any) -> None:
    """Add ``plan`` to the command line."""
    parser = commands.add_parser(
        "plan",
        help="print what a plan costs: bytes of a rank, collectives of a step and their seconds",
        description="Print the bytes that each rank of a plan holds and, where the model can be built, the collectives "
        "of a training step with their bytes, its FLOPs and its estimated seconds; or rank the meshes for a world and "
        "a memory. To count a step, one rank of the sharded model runs on tensors without memory; no GPU is needed. "
        "Exit status 0, 1 when the plan has errors, 2 when the options are wrong.",
    )
    parser.add_argument("plan", nargs="?", help="a plan file, or the name of one that comes with the package")
    add_model_arguments(parser)
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="N",
        help="samples of each data rank in a step (default 1); with --search, N for each rank of the world, dealt to "
        "the data ranks, so that every mesh does the same work",
    )  # fmt: skip
    parser.add_argument(
        "--seq", type=positive, metavar="N", help="tokens of a sample (default 4096, or as many as the model takes)"
    )
    dtypes = ("bfloat16", "float16", "float32", "float64")
    parser.add_argument("--dtype", choices=dtypes, help="of parameters and values (default the model's)")
    parser.add_argument("--optimizer", default="adamw", help="adamw, adam, momentum, sgd or none (default adamw)")
    parser.add_argument(
        "--zero", choices=("owners", "ranges", "gradients"),
        help="data ranks step parts, with ZeroRedundancyOptimizer: whole parameters, ranges, or ranges whose gradients "
        "alone they hold",
    )  # fmt: skip
    parser.add_argument("--hardware", default="h100", help="h100, h200, cpu, or a profile's file (default h100)")
    parser.add_argument("--no-step", action="store_true", help="bytes alone: no step is counted, torch not imported")
    parser.add_argument("--rank", type=int, metavar="R", help="also print what this rank holds")
    parser.add_argument("--search", action="store_true", help="rank the meshes that fit into --memory")
    parser.add_argument(
        "--memory", type=_bytes, metavar="SIZE",
        help="of a rank, as 80GiB (default: the hardware's); exit status 1 where the plan does not fit into it",
    )  # fmt: skip
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="measure this machine and write its profile")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run ``shardtensor plan``; returns the exit status."""
    if options.calibrate is not None:
        from shardtensor.cli.calibrate import calibrate

        status = calibrate(options.calibrate)
        if status or options.plan is None:
            return status
        options.hardware = str(options.calibrate)
    if options.plan is None:
        print("shardtensor plan: name a plan, or --calibrate FILE", file=sys.stderr)
        return 2
    from shardtensor.cli.plan_report import plan_report, search_report, show_plan, show_search

    try:
        report = search_report(options) if options.search else plan_report(options)
    except ShardTensorError as error:
        print(error, file=sys.stderr)
        return 1
    if options.format == "json":
        print(json.dumps(report, indent=2))
    else:
        (show_search if options.search else show_plan)(report)
    return int(options.memory is not None and not report.get("fits", True))


def _bytes(text: str) -> int:
    """Parse a size such as ``80GiB``.

    Example:
        >>> _bytes("80GiB"), _bytes("1.5 KB"), _bytes("12 B")
        (85899345920, 1500, 12)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        unit = found[1] if found is not None and not found[2] else "80"
        raise argparse.ArgumentTypeError(f"{text} is no size; give it a unit, as in {unit}GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])
