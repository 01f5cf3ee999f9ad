"""Saves and loads in which a call of one rank fails: what all ranks then raise, and what is left. Bodies for a pool."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broken_disk import Disk, Fault
from small_run import Run, whole_checkpoints

import shardtensor as st
from shardtensor.comm.process_group import as_group


def failing_save(
    folder: str, victim: int, asynchronous: bool, *, every: int = 1, codes: Sequence[int] = (errno.ENOSPC,)
) -> tuple[int, list[str]]:
    """Fail at each call of a save on one rank; return how many failed, and which laws were broken."""
    is_victim = as_group().rank == victim
    run = Run.new()
    run.save(f"{folder}/only", 1)
    with Disk() as disk:
        run.save(f"{folder}/only", 1)
    counts = [int(blob) for blob in as_group().exchange(f"{len(disk.calls):08}".encode())]
    broken, count = [], 0
    for at in range(0, counts[victim], every):
        code = codes[at % len(codes)]
        fault = Fault("error", at, ("before", "middle")[at % 2], code=code, lasting=code == errno.ENOSPC)

        def save(fault: Fault = fault) -> None:
            with Disk(fault if is_victim else None):
                run.save(f"{folder}/only", 2, asynchronous=asynchronous)

        count += 1
        broken += [f"call {at}: {text}" for text in _outcome(run, folder, save)]
    return count, broken


def full_disk(folder: str, victim: int, limits: Sequence[int]) -> list[str]:
    """Save with files limited to each of these sizes on one rank; return which laws were broken."""
    run = Run.new()
    run.save(f"{folder}/only", 1)
    broken = []
    for limit in limits:

        def save(limit: int = limit) -> None:
            old = resource.getrlimit(resource.RLIMIT_FSIZE)
            if as_group().rank == victim:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
            try:
                run.save(f"{folder}/only", 2)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, old)

        broken += [f"limit {limit}: {text}" for text in _outcome(run, folder, save)]
    return broken


def failing_load(folder: str, victim: int, *, every: int = 1) -> tuple[int, list[str]]:
    """Fail at each call of a load on one rank."""
    run = Run.new()
    run.save(f"{folder}/only", 1)
    with Disk() as disk:
        run.load(f"{folder}/only")
    places = [at for at, name in enumerate(disk.calls) if not name.startswith("close")]  # of what was only read
    places = as_group().exchange_objects(places)[victim][::every]
    broken = []
    for at in places:
        run.set_to(77)
        ended = "done"
        fault = Fault("error", at, code=errno.EIO) if as_group().rank == victim else None
        is_reading = False
        try:
            with Disk(fault) as disk:
                st.load(f"{folder}/only", **run.parts)
        except st.CheckpointError:
            ended = "refused"
            is_reading = any(name.startswith("preadv") for name in disk.calls)
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
        wrong = run.wrong(1 if ended == "done" else 77)
        if ended not in ("done", "refused") or (wrong and not is_reading):
            broken.append(f"call {at}: {ended}, wrong: {wrong}")
        if len(set(as_group().exchange_objects(ended))) > 1:
            broken.append(f"call {at}: ranks ended differently")
    return len(places), broken


def _outcome(run: Run, folder: str, save: Callable[[], Any]) -> list[str]:
    """Save step 2 over step 1, and return which laws were broken; all ranks return the same. Then save step 1 again."""
    broken, text = [], ""
    try:
        save()
    except st.CheckpointError as error:
        text = str(error)
    except Exception as error:
        broken.append(f"{type(error).__name__}: {error}")
    texts = as_group().exchange_objects(text)
    if len(set(texts)) > 1:
        broken.append(f"ranks ended differently: {texts}")
    newest = st.latest(folder)
    steps = whole_checkpoints(folder, run)
    if newest is None or run.load(newest) not in (1, 2):
        broken.append(f"the newest is {newest} of {steps}")
    elif steps not in ([{"only": 1}, {"only": 2}] if text else [{"only": 2}]):  # the old one may be left, not removed
        broken.append(f"there are {steps} after: {text or 'no error'}")
    if text and not any(word in text for word in ("ENOSPC", "OSError", "No space", "Input/output", "File too large")):
        broken.append(f"does not say why: {text}")
    left = [path.name for path in Path(folder).iterdir() if path.name.startswith(".") and path.name != ".only.old"]
    if left:
        broken.append(f"left {left} after: {text}")
    as_group().barrier()
    run.save(f"{folder}/only", 1)
    if as_group().rank == 0:
        shutil.rmtree(f"{folder}/.only.old", ignore_errors=True)
    as_group().barrier()
    return broken
