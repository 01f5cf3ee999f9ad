"""Crashes of the machine at every call of a save, and in the middle of every write, on one rank in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broken_disk import Crash, Disk, Fault
from small_run import Run, whole_checkpoints

import shardtensor as st

SAVES: dict[str, dict[str, Any]] = {
    "new": {},
    "replace": {},
    "keep last": {"keep_last": 1},
    "async": {"asynchronous": True},
}


def _path(parent: Path, mode: str, step: int) -> str:
    return str(parent / ("only" if mode == "replace" else f"step-{step}"))


def _before(parent: Path, mode: str, run: Run) -> None:
    shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir()
    run.save(_path(parent, mode, 1), 1)


def calls_of(parent: Path, mode: str, run: Run) -> list[tuple[str, int]]:
    """Return the calls of a save that follows another one, each with the bytes that it writes."""
    _before(parent, mode, run)
    with Disk() as disk:
        run.save(_path(parent, mode, 2), 2, **SAVES[mode])
    return list(zip(disk.calls, disk.sizes, strict=True))


def crashes_in(calls: list[tuple[str, int]], step: int) -> Iterator[Fault]:
    """Yield the crashes before and after each call, and one for every `step` bytes of each write."""
    for at, (name, size) in enumerate(calls):
        yield Fault("crash", at, "before")
        yield Fault("crash", at, "after")
        if name.startswith("pwrite"):
            yield from (Fault("crash", at, "middle", part=(byte + 0.5) / size) for byte in range(1, size, step))


def crash(parent: Path, mode: str, fault: Fault, run: Run, power_seed: int | None = None) -> str:
    """Let a save crash, and return which law that breaks; empty if none.

    With a seed the machine also loses what nobody has waited for.
    """
    _before(parent, mode, run)
    disk = Disk(fault, remembers=power_seed is not None)
    ended = False
    with disk:
        try:
            run.save(_path(parent, mode, 2), 2, **SAVES[mode])
            ended = True
        except Crash:
            pass
    if power_seed is not None:
        disk.lose_power(power_seed)
    try:
        found = whole_checkpoints(parent, run)
        newest = st.latest(parent)
        if newest is None or run.load(newest) != max(found.values(), default=0):
            return f"latest() returns {newest} of {found}"
        if not set(found.values()) <= {1, 2} or (ended and max(found.values()) != 2):
            return f"there are {found}, and the save ended: {ended}"
        run.save(_path(parent, mode, 2), 3, **SAVES[mode])
        if run.load(str(st.latest(parent))) != 3:
            return "a later save is not the newest"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
