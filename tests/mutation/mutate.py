"""Do the tests of a folder notice when its code is wrong? Single changes are made to it, and its tests are run.

    python tests/mutation/mutate.py                       # 200 changes, 40 a folder; fails under LEAST
    python tests/mutation/mutate.py --minutes 15 --least 0.95
    python tests/mutation/mutate.py --folder layout --count 100 --keep /tmp/recorded

First the tests of each folder run once, traced: which lines each runs, and how long it takes. Then for each change
those run that run the changed function: first the ones that run its line, the quickest first, until one fails. Changes
are chosen by a hash of what they are: so most are the same ones after an edit elsewhere. Those of `unseen.txt` alter
nothing that can be seen, each for the reason that is given there; they are not chosen.

The process that starts the others has imported torch and never the package; each change is a fork of it, with a copy
of the package first on the path. Processes of the pool that tests start find it by PYTHONPATH.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import math
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import hypothesis
import pytest
import torch
import torch._dynamo
import torch.distributed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from single_changes import Change, changes_of  # noqa: E402
from watch import Chooser, Lines, Recorder  # noqa: E402

FOLDERS = ("layout", "comm", "rules", "optim", "fsdp")
LATER = ("batch",)
"""Files whose names begin so are not changed yet: the rules of compiled steps, whose law is a sweep."""
LEAST = 0.95
"""The share of changes that has been noticed in every run so far: less is a step back."""
Tests = dict[str, tuple[float, Lines]]


def chosen(folder: str, count: int, seed: int, only: str) -> list[Change]:
    """The changes to make to a folder."""
    package = ROOT / "shardtensor"
    unseen = {tuple(line.split(" | ")[:3]) for line in (HERE / "unseen.txt").read_text().splitlines()}
    paths = sorted(path for path in (package / folder).rglob("*.py") if not path.name.startswith(LATER))
    found = [change for path in paths for change in changes_of(path, str(path.relative_to(package)))]
    found = [change for change in found if change.key not in unseen and only in str(change)]
    return sorted(found, key=lambda change: hashlib.sha1(repr((seed, change.key)).encode()).digest())[:count]


def tests_for(change: Change, tests: Tests) -> dict[str, float]:
    """The tests that may notice a change, in the order to run them, with a limit of time each."""
    place, line = (change.file, change.first), (change.file, change.line)
    ran = {name: lines for name, (_, lines) in tests.items() if place in lines}
    if change.first == 0 or not ran:  # runs at import; those that run anything of the file come first
        ran = {name: lines for name, (_, lines) in tests.items()}
        line = ()
    if not line:
        near = {name for name, lines in ran.items() if any(file == change.file for file, _ in lines)}
    else:
        near = {name for name, lines in ran.items() if line in lines}
    order = sorted(ran, key=lambda name: (name not in near, tests[name][0]))
    return {name: 15 + 8 * tests[name][0] for name in order}


def run_tests(overlay: Path, files: list[str], plugin: object) -> None:
    """What a fork does: run tests on the copy of the package in `overlay`."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    log = os.open(overlay / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(overlay)
    os.environ.update(PYTHONPATH=f"{overlay}:{HERE}", PYTHONDONTWRITEBYTECODE="1", SHARDTENSOR_TEST_FULL="0")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(overlay))
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    torch.set_num_threads(1)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("changed", deadline=None, derandomize=True, database=None, phases=phases)
    hypothesis.settings.load_profile("changed")
    options = ["-x", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--assert=plain", "--tb=short"]
    options += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist"]
    os._exit(int(pytest.main([*options, *files], plugins=[plugin])))


class Slots:
    """Runs as many forks at a time as there are copies of the package."""

    def __init__(self, overlays: list[Path]) -> None:
        self.free = overlays
        self.running: dict[int, tuple[Path, Callable[[Path, int], None]]] = {}

    def start(self, files: list[str], plugin: Callable[[Path], object], before: Callable, after: Callable) -> None:
        """Run tests in the next free copy; `before` and `after` are called with it, the second with how it ended."""
        self.wait()
        overlay = self.free.pop()
        before(overlay)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                run_tests(overlay, files, plugin(overlay))
            finally:
                os._exit(70)
        self.running[child] = overlay, after

    def wait(self) -> None:
        """Return when a copy is free."""
        while not self.free:
            self.reap()

    def reap(self) -> None:
        """Wait for one to end."""
        child, status = os.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the pool of a run that was cut short
        overlay, after = self.running.pop(child)
        after(overlay, os.waitstatus_to_exitcode(status))
        self.free.append(overlay)

    def drain(self) -> None:
        """Wait for all."""
        while self.running:
            self.reap()


def record(folders: list[str], slots: Slots, keep: Path) -> dict[str, Tests]:
    """Run the tests of each folder once as the code is; what they run."""
    for folder in folders:
        path = keep / f"{folder}.pickle"

        def after(overlay: Path, code: int, folder: str = folder) -> None:
            print(f"{folder}: its tests ran once", flush=True)
            if code != 0:
                sys.exit(f"the tests of {folder} fail before anything is changed:\n{(overlay / 'log').read_text()}")

        if not path.exists():
            recorder = Recorder(folder, str(path))
            slots.start([str(ROOT / "tests" / folder)], lambda _, r=recorder: r, lambda _: None, after)
    slots.drain()
    return {folder: pickle.loads((keep / f"{folder}.pickle").read_bytes()) for folder in folders}


def in_turns(lists: list[list[Change]]) -> list[Change]:
    """One of each list after the other, so that a run that ends early has made as many changes to each folder."""
    return [change for row in zip_longest(*lists) for change in row if change is not None]


def try_changes(
    changes: list[Change], recorded: dict[str, Tests], slots: Slots, until: float, verbose: bool
) -> tuple[list[Change], list[Change]]:
    """Make each change that can be begun in time, run tests; return those made, and those that none noticed."""
    survivors: list[Change] = []
    made: list[Change] = []
    start, done = time.monotonic(), [0]

    def note(change: Change, by: str | None) -> None:
        done[0] += 1
        if by is None:
            survivors.append(change)
            print(f"not noticed  {change}", flush=True)
        elif verbose:
            print(f"noticed      {change}\n             {by}", flush=True)
        if done[0] % 10 == 0 or done[0] == len(changes):
            left = (time.monotonic() - start) / done[0] * (len(changes) - done[0])
            caught = done[0] - len(survivors)
            print(f"{done[0]} of {len(changes)} changes, {caught} noticed; about {left:.0f} s left", flush=True)

    for change in changes:
        slots.wait()
        if time.monotonic() > until:
            print(f"time is over: {len(changes) - len(made)} changes were not begun", flush=True)
            break
        made.append(change)
        limits = tests_for(change, recorded[change.file.split("/")[0]])
        if not limits:
            note(change, None)
            continue

        def before(overlay: Path, change: Change = change) -> None:
            path = overlay / "shardtensor" / change.file
            path.write_bytes(change.applied(path.read_bytes()))

        def after(overlay: Path, code: int, change: Change = change) -> None:
            shutil.copy2(ROOT / "shardtensor" / change.file, overlay / "shardtensor" / change.file)
            by = (overlay / "failed").read_text() or f"pytest ended with {code}"
            note(change, None if code == 0 else by)

        def plugin(overlay: Path, limits: dict[str, float] = limits) -> Chooser:
            (overlay / "failed").write_text("")
            return Chooser(limits, str(overlay / "failed"))

        files = sorted({str(ROOT / name.split("::")[0]) for name in limits})
        slots.start(files, plugin, before, after)
    slots.drain()
    return made, survivors


def main() -> int:
    """Make the changes; 1 when too few are noticed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="changes of all folders together")
    parser.add_argument("--folder", action="append", choices=FOLDERS, help="only this one; may be given again")
    parser.add_argument("--seed", type=int, default=0, help="another one chooses others")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no change later; judge those made")
    parser.add_argument("--least", type=float, default=LEAST, help="fail where a smaller share of them is noticed")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--only", default="", help="only changes whose line of the report has this text")
    parser.add_argument("--keep", type=Path, help="a folder to keep the recorded runs in, and to take them from")
    parser.add_argument("--verbose", action="store_true", help="say which test noticed each change")
    asked = parser.parse_args()
    folders = asked.folder or list(FOLDERS)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="changed-") as scratch:
        overlays = [Path(scratch, str(job)) for job in range(asked.jobs)]
        for overlay in overlays:
            shutil.copytree(ROOT / "shardtensor", overlay / "shardtensor")
            compileall.compile_dir(overlay, quiet=1)
        keep = asked.keep or Path(scratch)
        keep.mkdir(exist_ok=True)
        slots = Slots(overlays)
        recorded = record(folders, slots, keep)
        each = [chosen(folder, asked.count // len(folders), asked.seed, asked.only) for folder in folders]
        made, survivors = try_changes(in_turns(each), recorded, slots, start + 60 * asked.minutes, asked.verbose)
    for folder in folders:
        tried = sum(c.file.startswith(f"{folder}/") for c in made)
        missed = sum(c.file.startswith(f"{folder}/") for c in survivors)
        print(f"{folder:8}{tried - missed} of {tried} noticed")
    print(f"{len(made) - len(survivors)} of {len(made)} noticed in {time.monotonic() - start:.0f} s")
    if made and len(made) - len(survivors) >= asked.least * len(made):
        return 0
    print(f"fewer than {asked.least:.0%}: write the law that is missing, or take out what is said twice")
    return 1


if __name__ == "__main__":
    sys.exit(main())
