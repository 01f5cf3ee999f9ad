"""The command ``shardtensor``."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from shardtensor.cli import check, ckpt, fmt, import_plan, plan, show
from shardtensor.cli.arguments import NO_NUMPY, positive
from shardtensor.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        options = _parser().parse_args(argv)
        with warnings.catch_warnings():  # torch warns at import if numpy is not installed
            warnings.filterwarnings("ignore", NO_NUMPY, UserWarning)
            status = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _run(options: argparse.Namespace) -> int:
    if hasattr(options, "run"):
        return options.run(options)
    if options.command == "ops":
        from shardtensor.cli import ops

        print(ops.page(), end="")
        return 0
    from shardtensor.cli.demo import run_demo  # after parsing, so that --help does not import torch

    return run_demo(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardtensor", description="Tensors that live on many devices.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    check.add_parser(commands)
    plan.add_parser(commands)
    show.add_parser(commands)
    commands.add_parser(
        "ops",
        help="print which operations have a sharding rule, and which one",
        description="Print the rule of every operation: what it does to layouts, and what combines the ranks' results; "
        "in Markdown, as the page specs/ops.md.",
    )
    import_plan.add_parser(commands)
    fmt.add_parser(commands)
    ckpt.add_parser(commands)
    demo = commands.add_parser(
        "demo",
        help="train a small language model, sharded, beside the same model on one process",
        description="Start ranks on this machine, shard a small decoder over them with one spec per parameter, train "
        "it on real text and compare every loss with the same training on one process. Exit status 0 when they are "
        "equal, 1 when they differ or a rank failed, 2 when the options are wrong.",
    )
    demo.add_argument("--world", type=positive, default=4, metavar="N", help="number of ranks (default 4)")
    demo.add_argument(
        "--text", type=Path, metavar="PATH", help="a text file, or a folder of them (default: Python's own library)"
    )
    demo.add_argument("--steps", type=positive, default=100, metavar="N", help="training steps (default 100)")
    demo.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes CUDA when there is a GPU for each rank (default auto)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
