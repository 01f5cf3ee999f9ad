"""The files of specs/valid and specs/invalid: what each is checked with, and what is then found.

``PYTHONPATH=. python tests/plan/corpus.py [PART OF A NAME]`` prints what differs from the text beside each file;
with ``--write`` it writes it there. Read each diagnostic before you do.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from shardtensor.errors import SpecError
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.findings.report import folded, text_report
from shardtensor.plan.loading import read_config
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.dims import model_from_dims
from shardtensor.plan.resolved import Resolved
from shardtensor.plan.text.reading import read_plan

SPECS = Path(__file__).parents[2] / "specs"
VALID = sorted((SPECS / "valid").glob("*.shard"))
INVALID = sorted((SPECS / "invalid").glob("*/*.shard"))


def options_of(text: str) -> argparse.Namespace:
    """What a plan says that it is checked with, on its line ``# check: --model tiny-llama --world 4``."""
    found = re.search(r"^# check: (.*)$", text, re.MULTILINE)
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--model")
    parser.add_argument("--set", action="append", default=[], type=lambda text: tuple(text.split("=", 1)))
    return parser.parse_args(found[1].split() if found else [])


def checked(plan: Path | str) -> tuple[Resolved | None, str]:
    """A plan, a file here or a text, matched to its tensors if it can be read, and what `check` finds in it."""
    options = options_of(plan if isinstance(plan, str) else plan.read_text())
    config, _ = read_config(options.model and SPECS / "models" / options.model / "config.json")
    name = plan if isinstance(plan, str) else plan.relative_to(SPECS).as_posix()
    try:
        read = read_plan(name, config=config, world=options.world, params=dict(options.set))
        resolved = resolve(read, model_from_dims(read))
    except SpecError as error:
        return None, text_report(folded(error.findings)) if error.findings else str(error)
    return resolved, text_report(folded(check_plan(resolved)))


def text_beside(path: Path) -> str:
    """The diagnostic that stands beside a file, empty where none does."""
    beside = path.with_suffix(".txt")
    return beside.read_text().rstrip("\n") if beside.exists() else ""


def main() -> None:
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
    main()
