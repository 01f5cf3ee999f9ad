"""``shardtensor show``: draw the shards of each rank, as maps in the terminal or as an HTML page.

Imports torch to count a step for the page.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from shardtensor.cli.arguments import add_model_arguments, add_step_arguments
from shardtensor.errors import ShardTensorError, SpecError

if TYPE_CHECKING:
    from shardtensor.cli.show_text import Scene

FAILS = 1


def add_parser(commands: Any) -> None:
    """Add ``show`` to the command line."""
    parser = commands.add_parser(
        "show",
        help="draw which part of each tensor of a plan each rank holds; as a page with the costs of a step",
        description="Draw which ranks hold what of every tensor of a plan. The HTML page has the costs of a training "
        "step, too, as `shardtensor plan` prints them, and several plans side by side. Needs no GPU and starts no "
        "process. Exit status 0, 1 when a plan has errors, 2 when the options are wrong.",
    )
    parser.add_argument("plans", nargs="+", metavar="plan", help="a plan file, or the name of one in the package")
    add_model_arguments(parser)
    parser.add_argument("--tensor", default="", metavar="PATTERN", help="only these tensors, as plans name them")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write one self-contained page, plans side by side")
    add_step_arguments(parser)
    parser.set_defaults(run=run, rank=None)


def run(options: argparse.Namespace) -> int:
    """Run ``shardtensor show``; returns the exit status."""
    from shardtensor.cli.check_text import print_findings
    from shardtensor.cli.show_text import page, print_scene
    from shardtensor.plan.findings.report import folded

    began = time.perf_counter()
    try:
        scenes = [_scene(argparse.Namespace(**vars(options), plan=plan)) for plan in options.plans]
    except SpecError as error:
        print_findings(error.findings) if error.findings else print(error, file=sys.stderr)
        return FAILS
    except ShardTensorError as error:
        print(error, file=sys.stderr)
        return FAILS
    shown = [scene for scene in scenes if scene.shown]
    if not shown and options.tensor:
        print(f"shardtensor show: no tensor is called `{options.tensor}`", file=sys.stderr)
    elif shown and options.html is not None:
        text = page(*shown)
        options.html.write_text(text, encoding="utf-8")
        print(f"{options.html}: {len(text.encode()) / 1024:.0f} KiB in {time.perf_counter() - began:.1f} s")
    for scene in scenes:
        if scene.shown and options.html is None:
            print_scene(scene)
        print_findings(folded(scene.resolved.errors))  # tensors with errors are not drawn, or drawn without them
    return FAILS if len(shown) < len(scenes) or any(scene.resolved.errors for scene in scenes) else 0


def _scene(options: argparse.Namespace) -> Scene:
    from shardtensor.cli.model_source import resolved_of
    from shardtensor.cli.show_text import scene_of_plan

    resolved = resolved_of(options.plan, options)
    subject = options.safetensors or options.module or options.model or ""
    scene = scene_of_plan(resolved, str(options.plan), subject, pattern=options.tensor)
    if options.html is None or resolved.errors:
        return scene
    from shardtensor.cli.plan_report import costs

    return attrs.evolve(scene, costs=costs(resolved, options))
