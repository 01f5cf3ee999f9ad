"""The parent's side of the pool: processes that outlive tests, jobs that run in them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from harness import worker

GRACE_S = 5.0  # for the other ranks, once one has failed

# Loaded once, in the process that all ranks are forked from, so that ranks that ended are replaced in no time.
# torch._dynamo is what the first optimizer would load. What that process cannot import, each rank loads itself.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "shardtensor.ops", "shardtensor.fsdp"]


class RankFailed(AssertionError):
    """A body failed on a rank, or did not return."""


class Pool:
    """Processes that run one job at a time: one function on each of the first ranks.

    The default process group of the ranks is kept between jobs of one size, and made anew when a job left it in doubt.

    Args:
        ranks: number of processes, and the largest world.
        device_type: ``"cpu"`` for gloo, ``"cuda"`` for NCCL with rank r on ``cuda:r``.
    """

    def __init__(self, ranks: int = 4, device_type: str = "cpu") -> None:
        self.ranks, self.device_type = ranks, device_type
        self._folder = tempfile.TemporaryDirectory(prefix="shardtensor-tests-")
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._jobs = 0
        self._kept_size = 0

    def __call__(self, body: Callable[..., Any], size: int = 4, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """Run ``body(**kwargs)`` on `size` ranks and return their results, by rank.

        Raises:
            RankFailed: with the traceback of the lowest rank that failed by itself, or where the ranks stood that did
                not return in time, or when the ranks left the default group after unequal numbers of collectives.
        """
        __tracebackhide__ = True
        if size > self.ranks:
            pytest.skip(f"needs {size} ranks; this pool has {self.ranks} of device type {self.device_type}")
        self._start()
        self._jobs += 1
        store = str(Path(self._folder.name, f"store-{self._jobs}")) if size != self._kept_size else None
        job = worker.Job(body.__module__, body.__qualname__, kwargs, size, store, [*sys.path, os.getcwd()])
        blob = pickle.dumps(job)
        for pipe in self._pipes:
            pipe.send_bytes(blob)
        replies = self._collect(size, timeout_s)
        failed = {rank: reply for rank, reply in replies.items() if reply.error}
        missing = [rank for rank in range(size) if rank not in replies]
        in_step = len({reply.collectives for reply in replies.values()}) == 1
        is_clean = not missing and in_step and all(reply.is_clean for reply in replies.values())
        self._kept_size = size if is_clean else 0
        stacks = self._stop_stuck(missing) if missing else ""
        if failed:
            own = {rank: reply for rank, reply in failed.items() if not reply.lost_a_peer} or failed
            rank = min(own)
            raise RankFailed(f"rank {rank} of {size} failed (failed: {sorted(failed)})\n\n{own[rank].error}{stacks}")
        if missing:
            raise RankFailed(f"ranks {missing} of {size} did not return within {timeout_s:g} s{stacks}")
        if not in_step:
            counts = {rank: reply.collectives for rank, reply in sorted(replies.items())}
            raise RankFailed(f"the ranks made unequal numbers of collectives in the default group: {counts}")
        return [replies[rank].result for rank in range(size)]

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self._end_processes()
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded; with threads of its own nothing can be forked
        try:
            for rank in range(self.ranks):
                ours, theirs = context.Pipe()
                args = (rank, self.device_type, theirs, self._stack_file(rank))
                process = context.Process(target=worker.serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._folder.name, f"stack-{rank}.txt"))

    def _collect(self, size: int, timeout_s: float) -> dict[int, worker.Reply]:
        """The replies that come in time; a failure shortens the time for the rest."""
        ranks = {self._pipes[rank]: rank for rank in range(size)}
        replies: dict[int, worker.Reply] = {}
        end = time.monotonic() + timeout_s
        while ranks and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(ranks), left):
                rank = ranks.pop(pipe)
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join()
                    code = self._processes[rank].exitcode
                    replies[rank] = worker.Reply(error=f"the process ended with exit code {code}")
                if replies[rank].error:
                    end = min(end, time.monotonic() + GRACE_S)
        return replies

    def _stop_stuck(self, missing: list[int]) -> str:
        """End the pool; say where the stuck ranks stood."""
        for rank in missing:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
                self._processes[rank].join(0.3)
        texts = [f"\n\nrank {rank} stood at\n{Path(self._stack_file(rank)).read_text()}" for rank in missing]
        self._end_processes()
        return "".join(texts)

    def _end_processes(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._kept_size = [], [], 0

    def close(self) -> None:
        """End the processes and remove what they left."""
        self._end_processes()
        self._folder.cleanup()
