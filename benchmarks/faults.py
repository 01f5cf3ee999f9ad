"""Checkpoints and faults: ranks die, disks fail, files are damaged; the exit status is 1 if a law is broken.

* kills: ranks are killed at random times, and before, in or after random calls of the operating system or between
  ranks, in saves of all kinds and in loads; or they stop without an end. After each death the newest checkpoint is
  loaded by another process and compared with what was saved, the other ranks have ended with an error in time, and the
  ranks of the next point save into the same folder. Real processes on gloo; their timeout is 10 s.
* crashes: the machine is off at every call of a save, and in the middle of writes; with and without a loss of what
  nobody had waited for.
* full disks: every call of a save, or of a load, fails on one rank; files may not grow beyond a limit.
* damage: files cut, swapped, missing, of other checkpoints; bits flipped; manifests edited by hand.
* mutations: manifests and headers changed at random, most with right checksums again.

    python benchmarks/faults.py [--points 200] [--mutations 10000] [--parts kills crashes ...] [--seed 0]
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: ranks are forked
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "checkpoint"))

import torch
from crash_points import SAVES, calls_of, crash, crashes_in
from damaged_loads import Victim
from damages import flips, of_files, of_hands
from failing_saves import failing_load, failing_save, full_disk
from harness.pool import Pool
from killed_ranks import MODES, Point, Ranks
from mutated import Mutants, checkpoints
from report import write
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from small_run import Run

from shardtensor.sim.simulate import simulate

LAWS = ("hung", "damaged", "lost", "changed")
Row = dict[str, Any]
Bar = Callable[[int, str], Callable[[], None]]


class Tally:
    """What was tried, and the laws that were broken; the first few texts of these are printed."""

    def __init__(self, part: str, options: argparse.Namespace) -> None:
        self.part, self.show = part, options.show
        self.tried: Counter[str] = Counter()
        self.broken: Counter[tuple[str, str]] = Counter()
        self.more: dict[str, Row] = {}

    def add(self, kind: str, law: str = "", text: str = "", **numbers: int) -> None:
        self.tried[kind] += 1
        for name, number in numbers.items():
            row = self.more.setdefault(kind, {})
            row[name] = row.get(name, 0) + number
        if law:
            self.broken[kind, law] += 1
            if self.broken.total() <= self.show:
                print(f"--- {self.part}, {kind}: {law}: {text}", flush=True)

    def rows(self) -> list[Row]:
        return [
            {"part": self.part, "what": kind, "points": count, **{law: self.broken[kind, law] for law in LAWS}}
            | {"notes": ", ".join(f"{number} {name}" for name, number in self.more.get(kind, {}).items())}
            for kind, count in self.tried.items()
        ]


def kills(tally: Tally, options: argparse.Namespace, bar: Bar) -> None:
    """Let ranks die, or stop."""
    done = bar(options.points, "kills")
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(folder)
        for seed in range(options.seed, options.seed + options.points):
            point = Point.drawn(seed)
            outcome = ranks.point(point)
            ends = list(outcome.ends.values())
            law, text = next(iter(outcome.broken.items()), ("", ""))
            tally.add(
                point.mode, law, f"{point}: {text}", killed=sum(end == "killed" for end in ends),
                raised=sum(end.startswith("error") for end in ends), stopped=point.when == "stop", new=outcome.is_new,
            )  # fmt: skip
            done()


def crashes(tally: Tally, options: argparse.Namespace, bar: Bar) -> None:
    """Turn the machine off at every call, and every few bytes."""
    with tempfile.TemporaryDirectory(dir=options.memory) as folder:
        run, parent = Run.new(), Path(folder, "runs")
        faults = {mode: list(crashes_in(calls_of(parent, mode, run), options.bytes)) for mode in SAVES}
        done = bar(4 * sum(map(len, faults.values())), "crashes")
        for mode, each in faults.items():
            for seed in (None, 0, 1, 2):
                for place, fault in enumerate(each):
                    text = crash(parent, mode, fault, run, None if seed is None else 3 * place + seed)
                    kind = mode if seed is None else f"{mode}, power lost"
                    tally.add(kind, "damaged" * bool(text), f"{fault}: {text}")
                    done()


def full_disks(tally: Tally, options: argparse.Namespace, bar: Bar) -> None:
    """Let every call of a save or a load fail on one of two ranks."""
    limits = [*range(0, 4000, 250), 8_000, 12_000, 16_000]
    codes = (errno.ENOSPC, errno.EIO)
    jobs: list[tuple[str, Any, dict[str, Any]]] = []
    for victim in range(2):
        for asynchronous in (False, True):
            arguments = {"asynchronous": asynchronous, "codes": codes}
            jobs.append((f"{'async ' * asynchronous}save", failing_save, {"victim": victim, **arguments}))
        jobs.append(("load", failing_load, {"victim": victim}))
        jobs.append(("limit of sizes", full_disk, {"victim": victim, "limits": limits}))
    done = bar(len(jobs), "full disks")
    pool = Pool(2)
    for name, body, arguments in jobs:
        with tempfile.TemporaryDirectory(dir=options.memory) as folder:
            try:
                found = pool(body, 2, timeout_s=300, folder=folder, **arguments)[0]
                count, broken = found if isinstance(found, tuple) else (len(limits), found)
            except AssertionError as error:
                count, broken = 1, [f"hung or ended: {error}"]
            for _ in range(count - len(broken)):
                tally.add(name)
            for text in broken:
                tally.add(name, "hung" if text.startswith("hung") else "damaged", text)
        done()
    pool.close()


def damage(tally: Tally, options: argparse.Namespace, bar: Bar) -> None:
    """Damage files, of a checkpoint of one rank and of one of three."""
    with tempfile.TemporaryDirectory(dir=options.memory) as folder:
        victim = Victim(Path(folder), Run.new())
        kinds = {
            "files": list(of_files(victim.whole, victim.other)),
            "edits": list(of_hands(victim.whole)),
            "bits": list(flips(victim.whole, options.flips, options.seed)),
        }
        done = bar(sum(map(len, kinds.values())), "damage")
        for kind, damages in kinds.items():
            for each in damages:
                text = victim.broken_law(each)
                tally.add(kind, "damaged" * bool(text), text)
                done()


def mutations(tally: Tally, options: argparse.Namespace, bar: Bar) -> None:
    """Load mutated manifests and headers."""
    done = bar(options.mutations, "mutations")
    with tempfile.TemporaryDirectory(dir=options.memory) as folder:
        mutants = Mutants(Path(folder), checkpoints(Path(folder), simulate), Run.new())
        for seed in range(options.seed, options.seed + options.mutations):
            verdict = mutants.verdict(seed, memory=seed % 20 == 0)
            law = ("hung" if verdict.law.startswith("took") else "damaged") if verdict.law else ""
            tally.add("mutants", law, f"seed {seed}: {verdict.law}", **{verdict.outcome: 1})
            done()


PARTS = {
    "kills": kills,
    "crashes": crashes,
    "full disks": full_disks,
    "damage": damage,
    "mutations": mutations,
}


def main() -> int:
    """Run the parts; the exit status is 1 when a law was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200, help="deaths of ranks")
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--flips", type=int, default=2000, help="bits flipped in each file")
    parser.add_argument("--bytes", type=int, default=2000, help="of a write between two crashes in it")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0, help="of the first point; the others follow")
    parser.add_argument("--show", type=int, default=5, help="broken laws that are printed of each part")
    options = parser.parse_args()
    options.memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start, rows = time.perf_counter(), []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:

        def bar(total: int, name: str) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        for part in options.parts:
            tally = Tally(part, options)
            PARTS[part](tally, options, bar)
            rows += tally.rows()
    broken = sum(row[law] for row in rows for law in LAWS)
    modes = f"of {len(MODES)} kinds"
    write("faults", rows, seconds=round(time.perf_counter() - start), broken=broken, modes=modes)
    print(f"{sum(row['points'] for row in rows)} points in {time.perf_counter() - start:.0f} s; {broken} broke a law")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
