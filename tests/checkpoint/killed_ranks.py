"""Ranks that are killed while they save or load: real processes, forked from one that has loaded all modules.

A *point* is one death. The ranks of a point load the newest checkpoint, which verifies what the point before has left;
complete a save; then some of them die in another save, or in a load. `Ranks.point` returns which laws were broken.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from broken_disk import Disk, Fault
from small_run import Run, whole_checkpoints

import shardtensor as st

HERE = Path(__file__).parent
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "shardtensor.ops", "shardtensor.fsdp", "killed_ranks"]
TIMEOUT_S = 10.0
SLACK_S = 8.0  # for a busy machine: to raise, and to end
MODES = {
    "save": {},
    "replace": {},
    "as is": {"layout": "as is"},
    "keep last": {"keep_last": 1},
    "async": {"asynchronous": True},
    "load": {},
}


@attrs.frozen(kw_only=True)
class Point:
    """One death.

    Attributes:
        mode: what the ranks do when it comes, see `MODES`.
        victims: the ranks that die.
        share: when: this share of the calls of a whole save or load, or of its time.
        when: ``before``, in the ``middle`` of, or ``after`` a call; or at a ``time``; ``stop``: the rank does not die
            but does nothing any more.
        part: how much of the bytes is written in the middle.
    """

    mode: str
    world: int
    victims: tuple[int, ...]
    when: str
    share: float
    part: float
    width: int = 7

    @classmethod
    def drawn(cls, seed: int, *, modes: tuple[str, ...] = tuple(MODES), stops: bool = True) -> Point:
        """Return the point of a seed."""
        draw = random.Random(seed)
        world = draw.choice([2, 3, 4])
        when = draw.choice(["before", "middle", "after", "time", "time"])
        if stops and draw.random() < 0.04:
            when = "stop"
        all_die = when == "time" and draw.random() < 0.4
        victims = tuple(range(world)) if all_die else (draw.choice([0, draw.randrange(world)]),)
        width = 150_000 if draw.random() < 0.1 else 7
        return cls(
            mode=modes[seed % len(modes)], world=world, victims=victims, when=when, share=draw.random(),
            part=draw.random(), width=width,
        )  # fmt: skip

    def path(self, parent: str, step: int) -> str:
        """Return where a step is saved."""
        return f"{parent}/only" if self.mode == "replace" else f"{parent}/step-{step}"


@attrs.define
class Outcome:
    """What happened: the laws that were broken, by kind, each with a text; and how each rank ended."""

    broken: dict[str, str] = attrs.field(factory=dict)
    ends: dict[int, str] = attrs.field(factory=dict)
    waited_s: float = 0.0
    is_new: bool = False


class Ranks:
    """Starts the ranks of points, in one folder of checkpoints for each width of the model."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._context = get_context("forkserver")
        sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
        self._context.set_forkserver_preload(PRELOAD)
        self._count = 0

    def point(self, point: Point) -> Outcome:
        """Let some ranks die, and return which laws that breaks."""
        self._count += 1
        parent = f"{self._folder}/width-{point.width}"
        os.makedirs(parent, exist_ok=True)
        store = f"{self._folder}/store-{self._count}"
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the process that ranks are forked from
        pipes, processes = [], []
        for rank in range(point.world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_rank, args=(rank, point, parent, store, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            outcome = self._watch(point, pipes, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
            Path(store).unlink(missing_ok=True)
        return outcome

    def _watch(self, point: Point, pipes: list[Any], processes: list[Any]) -> Outcome:
        outcome, steps = Outcome(), dict[int, int]()
        begun: dict[int, float] = {}
        ranks = dict(zip(pipes, range(point.world), strict=True))
        end, died = time.monotonic() + 60, 0.0
        while ranks and time.monotonic() < end:
            for pipe in wait(list(ranks), max(0.0, end - time.monotonic())):
                rank = ranks[pipe]
                try:
                    what, value = pipe.recv()
                except EOFError:
                    del ranks[pipe]
                    outcome.ends.setdefault(rank, "killed" if rank in point.victims else "ended without a word")
                    continue
                if what == "fault":  # before anybody was to die
                    outcome.broken["lost"] = value
                    return outcome
                if what == "begin":
                    begun[rank], steps[rank] = value
                else:
                    outcome.ends[rank] = value
            if not died and len(begun) == point.world:
                died = time.monotonic()
                if point.when in ("time", "stop"):
                    time.sleep(point.share * 1.2 * max(begun.values()))
                    for rank in point.victims:
                        with suppress(ProcessLookupError):  # it was faster
                            os.kill(processes[rank].pid, signal.SIGSTOP if point.when == "stop" else signal.SIGKILL)
                end = time.monotonic() + TIMEOUT_S + SLACK_S
            if died and set(ranks.values()) <= set(point.victims) and point.when == "stop":
                break
        for rank, process in enumerate(processes):
            if rank in point.victims and point.when == "stop":
                continue
            process.join(max(0.1, end - time.monotonic()))
            if process.is_alive():
                outcome.broken["hung"] = f"rank {rank} did not end within {TIMEOUT_S + SLACK_S:g} s"
        outcome.waited_s = time.monotonic() - died
        if not steps:
            outcome.broken.setdefault("lost", f"the ranks did not begin: {outcome.ends}")
            return outcome
        for process in processes:
            process.kill()
            process.join()
        self._check(point, max(steps.values()), outcome)
        return outcome

    def _check(self, point: Point, before: int, outcome: Outcome) -> None:
        """Load what is there in another process, and compare it with what has to be there."""
        parent = f"{self._folder}/width-{point.width}"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_load_all, args=(parent, point.width, theirs), daemon=True)
        process.start()
        theirs.close()
        found: Any = ours.recv() if ours.poll(60) else "the check did not end"
        process.join()
        ours.close()
        if isinstance(found, str):
            outcome.broken["damaged"] = found
            return
        newest, steps = found
        allowed = {before} if point.mode == "load" else {before, before + 1}
        if newest not in allowed:
            outcome.broken["lost"] = f"the newest is of step {newest}; step {before} was complete; there are {steps}"
        outcome.is_new = newest == before + 1
        survivors = {rank: end for rank, end in outcome.ends.items() if rank not in point.victims}
        if any(end == "done" for end in outcome.ends.values()) and point.mode != "load" and not outcome.is_new:
            outcome.broken["lost"] = f"a rank returned from a save that is not there: {outcome.ends}"
        odd = [end for end in survivors.values() if end != "done" and not end.startswith("error")]
        if odd:
            outcome.broken["changed"] = odd[0]
        for name, step in steps.items():  # so that the folder does not grow
            if step < before and name != "only":
                Path(parent, name).rename(Path(parent, f".gone-{name}-{self._count}"))


def _load_all(parent: str, width: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        run = Run.new(width=width)
        found = whole_checkpoints(parent, run)
        newest = st.latest(parent)
        pipe.send((None if newest is None else run.load(newest), found))
    except BaseException:
        pipe.send(traceback.format_exc()[-1500:])


def _rank(rank: int, point: Point, parent: str, store: str, pipe: Any) -> None:
    """Be one of the ranks of a point."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, point.world), rank=rank, world_size=point.world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )  # fmt: skip
        run = Run.new(width=point.width)
        newest = st.latest(parent)
        step = 0 if newest is None else run.load(newest)
        took, calls = _whole(run, point, parent, step + 1)
    except BaseException:
        pipe.send(("fault", f"rank {rank}: {traceback.format_exc()[-1500:]}"))
        return
    run.set_to(step + 1000)
    fault = None
    if rank in point.victims and point.when not in ("time", "stop"):
        fault = Fault("kill", int(point.share * calls), point.when, point.part)
    dist.barrier()
    pipe.send(("begin", (took, step + 1)))
    try:
        with Disk(fault, sends=True):
            _act(run, point, parent, step + 2)
        wrong = run.wrong(step + 1) if point.mode == "load" else []
        pipe.send(("end", f"after a load, wrong: {wrong}" if wrong else "done"))
    except BaseException as error:
        text = f"error {type(error).__name__}: {str(error).splitlines()[0][:100]}"
        if point.mode == "load" and isinstance(error, st.CheckpointError) and run.wrong(step + 1000):
            text = f"changed by a load that failed: {run.wrong(step + 1000)}"
        pipe.send(("end", text))


def _whole(run: Run, point: Point, parent: str, step: int) -> tuple[float, int]:
    """Complete a save, and of a point in a load that load; return the seconds and the calls that it takes."""
    if point.mode == "load":
        run.save(point.path(parent, step), step)
    start = time.perf_counter()
    with Disk(sends=True) as disk:
        _act(run, point, parent, step if point.mode != "load" else step + 1)
    return time.perf_counter() - start, len(disk.calls)


def _act(run: Run, point: Point, parent: str, step: int) -> None:
    if point.mode == "load":
        st.load(point.path(parent, step - 1), **run.parts)
    else:
        run.save(point.path(parent, step), step, **MODES[point.mode])
