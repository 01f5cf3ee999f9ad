"""``shardtensor show``: who holds what, as maps in the terminal or as one page to look at. Imports no torch."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from shardtensor.cli.arguments import add_model_arguments
from shardtensor.errors import ShardTensorError, SpecError

if TYPE_CHECKING:
    from shardtensor.cli.scene import Scene

FAILS, USAGE = 1, 2


def add_parser(commands: Any) -> None:
    """Add ``show`` to the command line."""
    parser = commands.add_parser(
        "show",
        help="draw who holds what: a plan for a model, or one spec",
        description="Draw which ranks hold what of every tensor of a plan, or of one spec with --shape and --mesh. "
        "Needs no GPU and starts no process. Exit status 0, 1 when the plan or the spec has errors, 2 when the options "
        "are wrong.",
    )
    parser.add_argument("what", metavar="PLAN|SPEC", help='a plan file or its name; or a spec such as "[tp, -]"')
    parser.add_argument("--shape", type=_shape, metavar="8x6", help="of the tensor, for a spec")
    parser.add_argument("--mesh", metavar="AXES", help='the ranks, for a spec: "dp=2, tp=4"')
    parser.add_argument("--dtype", default="float32", help="of the elements, for a spec (default float32)")
    add_model_arguments(parser)
    parser.add_argument("--tensor", default="", metavar="PATTERN", help="only these tensors, as plans name them")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write one self-contained page")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run ``shardtensor show``; returns the exit status."""
    is_spec = options.what.lstrip().startswith("[") or options.what == "replicate"
    missing = [name for name, given in (("--shape", options.shape), ("--mesh", options.mesh)) if given is None]
    if len(missing) == 1 or (missing and is_spec):
        wanted = " and ".join(missing)
        print(f'shardtensor show: give {wanted}, too, as in --shape 8x6 --mesh "dp=2, tp=4"', file=sys.stderr)
        return USAGE
    began = time.perf_counter()
    try:
        scene = _scene_of_spec(options) if options.shape is not None else _scene_of_plan(options)
    except SpecError as error:
        from shardtensor.cli.check_text import print_findings

        print_findings(error.findings) if error.findings else print(error, file=sys.stderr)
        return FAILS
    except ShardTensorError as error:
        print(error, file=sys.stderr)
        return FAILS
    if not scene.shown:
        if options.tensor:
            print(f"shardtensor show: no tensor is called `{options.tensor}`", file=sys.stderr)
        return _print_findings(scene) or FAILS
    if options.html is None:
        from shardtensor.cli.show_text import print_scene

        print_scene(scene)
    else:
        from shardtensor.cli.show_page import page

        text = page(scene)
        options.html.write_text(text, encoding="utf-8")
        print(f"{options.html}: {len(text.encode()) / 1024:.0f} KiB in {time.perf_counter() - began:.1f} s")
    return _print_findings(scene)


def _scene_of_spec(options: argparse.Namespace) -> Scene:
    from shardtensor.cli.scene import scene_of_spec
    from shardtensor.mesh import read_mesh

    mesh = read_mesh(int(options.mesh) if options.mesh.strip().isdecimal() else options.mesh)
    return scene_of_spec(options.what, options.shape, mesh, dtype=options.dtype)


def _scene_of_plan(options: argparse.Namespace) -> Scene:
    from shardtensor.cli.model_source import resolved_of
    from shardtensor.cli.scene import scene_of_plan

    scene = scene_of_plan(resolved_of(options.what, options), str(options.what), pattern=options.tensor)
    return attrs.evolve(scene, subject=options.safetensors or options.module or options.model or "")


def _print_findings(scene: Scene) -> int:
    """Print errors; tensors with errors are missing in the drawing, or drawn without them."""
    if scene.resolved is None or not scene.resolved.errors:
        return 0
    from shardtensor.cli.check_text import print_findings
    from shardtensor.plan.findings.report import folded

    print_findings(folded(scene.resolved.errors))
    return FAILS


def _shape(text: str) -> tuple[int, ...]:
    words = text.replace("×", "x").replace(",", "x").split("x") if text.strip() not in ("", "scalar") else []
    sizes = tuple(int(word) for word in words)
    if any(size < 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text} is no shape; write such as 8x6")
    return sizes
