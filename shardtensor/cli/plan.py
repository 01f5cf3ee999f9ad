"""``shardtensor plan``: the costs of a plan on a machine, before it runs.

Imports torch to count a step, and to calibrate.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from shardtensor.cli.arguments import add_model_arguments, add_step_arguments
from shardtensor.errors import ShardTensorError


def add_parser(commands: Any) -> None:
    """Add ``plan`` to the command line."""
    parser = commands.add_parser(
        "plan",
        help="print what a plan costs: bytes of a rank, collectives of a step and their seconds",
        description="Print the bytes that each rank of a plan holds and, where the model can be built, the collectives "
        "of a training step with their bytes, the activations of each module, its FLOPs, its estimated seconds and its "
        "model FLOPs utilisation (MFU); or rank the meshes for a world and a memory. To count a step, one rank of the "
        "sharded model runs on tensors without memory; no GPU is needed. Exit status 0, 1 when the plan has errors, 2 "
        "when the options are wrong.",
    )
    parser.add_argument("plan", nargs="?", help="a plan file, or the name of one that comes with the package")
    add_model_arguments(parser)
    add_step_arguments(parser)
    parser.add_argument("--rank", type=int, metavar="R", help="also print what this rank holds")
    parser.add_argument("--search", action="store_true", help="rank the meshes that fit into --memory")
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
