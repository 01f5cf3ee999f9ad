"""``shardtensor fmt``: plan files in canonical text. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from shardtensor.errors import SpecError
from shardtensor.spec.diagnostics import Source


def add_parser(commands: Any) -> None:
    """Add the command to the others."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "fmt",
        help="write plan files in canonical text",
        description="Rewrite plan files in the one style of the language; comments stay, and the meaning. "
        "Exit status 0 when all is well, 1 when a file is no plan or, with --check, would change, 2 when it is "
        "not there.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a plan file; - reads standard input and prints")
    parser.add_argument("--check", action="store_true", help="write nothing; name the files that would change")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Format the files; returns the exit status."""
    return max(_format(name, options.check) for name in options.files)


def _format(name: str, only_check: bool) -> int:
    from shardtensor.plan.text.formatting import format_plan  # lark is imported only if there is a file to read

    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    try:
        formatted = format_plan(Source(text, "<stdin>" if name == "-" else name))
    except SpecError as error:
        print(error, file=sys.stderr)
        return 1
    if only_check:
        if formatted != text:
            print(f"{name} would change")
        return int(formatted != text)
    if name == "-":
        print(formatted, end="")
    elif formatted != text:
        Path(name).write_bytes(formatted.encode("utf-8"))
        print(f"{name} changed")
    return 0
