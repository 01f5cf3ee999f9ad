"""The files of specs/valid and specs/invalid: what each is checked with, and what is then found.

``PYTHONPATH=. python tests/plan/corpus.py [PART OF A NAME]`` prints what differs from the text beside each file;
with ``--write`` it writes it there. Read each diagnostic before you do.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from shardtensor.errors import SpecError
from shardtensor.plan.dims import model_from_dims
from shardtensor.plan.folding import folded
from shardtensor.plan.loading import read_config
from shardtensor.plan.reading import read_plan
from shardtensor.plan.report import text_report
from shardtensor.plan.resolve import resolve
from shardtensor.plan.resolved import Resolved

SPECS = Path(__file__).parents[2] / "specs"
VALID = sorted((SPECS / "valid").glob("*.shard"))
INVALID = sorted((SPECS / "invalid").glob("*/*.shard"))


def options_of(path: Path) -> argparse.Namespace:
    """What the file says that it is checked with, on its line ``# check: --model tiny-llama --world 4``."""
    found = re.search(r"^# check: (.*)$", path.read_text(), re.MULTILINE)
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--model")
    parser.add_argument("--set", action="append", default=[], type=lambda text: tuple(text.split("=", 1)))
    return parser.parse_args(found[1].split() if found else [])


def checked(path: Path) -> tuple[Resolved | None, str]:
    """The plan of a file matched to its tensors, if it can be read, and what `shardtensor check` finds in it."""
    from shardtensor.plan.gradients import check_flows

    options = options_of(path)
    model = options.model and SPECS / "models" / options.model / "config.json"
    config, _ = read_config(model)
    name = path.relative_to(SPECS).as_posix()
    try:
        plan = read_plan(name, config=config, world=options.world, params=dict(options.set))
        resolved = resolve(plan, model_from_dims(plan))
    except SpecError as error:
        return None, text_report(folded(error.findings)) if error.findings else str(error)
    findings = resolved.findings if resolved.errors else (*resolved.findings, *check_flows(resolved))
    return resolved, text_report(folded(findings))


def text_beside(path: Path) -> str:
    """The diagnostic that stands beside a file, empty where none does."""
    beside = path.with_suffix(".txt")
    return beside.read_text().rstrip("\n") if beside.exists() else ""


def main() -> None:
    import os

    os.chdir(SPECS)
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for path in (*VALID, *INVALID):
        name = path.relative_to(SPECS).as_posix()
        if options.part not in name:
            continue
        found = checked(path)[1]
        if found == text_beside(path):
            continue
        print(f"=== {name}\n{found}\n")
        if options.write and found:
            path.with_suffix(".txt").write_text(found + "\n")
        elif options.write:
            path.with_suffix(".txt").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
