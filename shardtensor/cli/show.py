"""``shardtensor show``: draw the shards of each rank, as maps in the terminal or as an HTML page. Imports no torch."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from shardtensor.cli.arguments import add_model_arguments
from shardtensor.errors import ShardTensorError, SpecError

FAILS = 1


def add_parser(commands: Any) -> None:
    """Add ``show`` to the command line."""
    parser = commands.add_parser(
        "show",
        help="draw which part of each tensor of a plan each rank holds",
        description="Draw which ranks hold what of every tensor of a plan. Needs no GPU and starts no process. Exit "
        "status 0, 1 when the plan has errors, 2 when the options are wrong.",
    )
    parser.add_argument("plan", help="a plan file, or the name of one that comes with the package")
    add_model_arguments(parser)
    parser.add_argument("--tensor", default="", metavar="PATTERN", help="only these tensors, as plans name them")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write one self-contained page")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run ``shardtensor show``; returns the exit status."""
    from shardtensor.cli.check_text import print_findings
    from shardtensor.cli.model_source import resolved_of
    from shardtensor.cli.scene import scene_of_plan
    from shardtensor.cli.show_text import page, print_scene
    from shardtensor.plan.findings.report import folded

    began = time.perf_counter()
    try:
        resolved = resolved_of(options.plan, options)
        subject = options.safetensors or options.module or options.model or ""
        scene = scene_of_plan(resolved, str(options.plan), subject, pattern=options.tensor)
    except SpecError as error:
        print_findings(error.findings) if error.findings else print(error, file=sys.stderr)
        return FAILS
    except ShardTensorError as error:
        print(error, file=sys.stderr)
        return FAILS
    if not scene.shown and options.tensor:
        print(f"shardtensor show: no tensor is called `{options.tensor}`", file=sys.stderr)
    elif scene.shown and options.html is None:
        print_scene(scene)
    elif scene.shown:
        text = page(scene)
        options.html.write_text(text, encoding="utf-8")
        print(f"{options.html}: {len(text.encode()) / 1024:.0f} KiB in {time.perf_counter() - began:.1f} s")
    print_findings(folded(resolved.errors))  # tensors with errors are not drawn, or drawn without them
    return FAILS if resolved.errors or not scene.shown else 0
