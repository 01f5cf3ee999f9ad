"""How far a run is and how long it will take: a line every quarter of a minute, in a log without a terminal, too.

``tests/seconds.txt`` holds what the files took that take long, in seconds of one measured run. Files are run in this
order, the longest first, so that no worker is left with a long one at the end; and what remains is estimated by them.
SHARDTENSOR_TEST_SECONDS=PATH writes such a file at the end of a run.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

EVERY_S = 15.0
LEAST_S = 1.0  # files that take less are not recorded
OTHER_S = 0.02  # a test of a file without a record
RECORDED = Path(__file__).parent.parent / "seconds.txt"


def recorded_seconds() -> dict[str, float]:
    """Seconds by file, as in ``tests/ops/test_views.py``."""
    lines = [line.split() for line in RECORDED.read_text().splitlines() if line and line[0] != "#"]
    return {path: float(seconds) for seconds, path in lines}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def longest_first(nodeids: list[str]) -> dict[str, int]:
    """The place of each file in the order of a run."""
    seconds = recorded_seconds()
    files = dict.fromkeys(map(file_of, nodeids))
    return {file: place for place, file in enumerate(sorted(files, key=lambda file: -seconds.get(file, 0.0)))}


class Progress:
    """A plugin of the process that reports: it counts the tests that are done, on all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start = self.last = time.monotonic()
        self.weight: dict[str, float] = {}  # by test
        self.todo = 0.0
        self.done = 0
        self.done_weight = 0.0
        self.spent: Counter[str] = Counter()  # by file

    def _expect(self, nodeids: list[str]) -> None:
        if self.weight:
            return  # each worker collects all
        self.start = self.last = time.monotonic()
        seconds, counts = recorded_seconds(), Counter(map(file_of, nodeids))
        for nodeid in nodeids:
            file = file_of(nodeid)
            self.weight[nodeid] = seconds[file] / counts[file] if file in seconds else OTHER_S
        self.todo = sum(self.weight.values())

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers."""
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With workers, of which each collects all."""
        self._expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once it is over."""
        self.spent[file_of(report.nodeid)] += report.duration
        if report.when != "teardown":
            return
        self.done += 1
        self.done_weight += self.weight.get(report.nodeid, OTHER_S)
        now = time.monotonic()
        if now - self.last >= EVERY_S:
            self.last = now
            self._say(line_of(self.done, len(self.weight), now - self.start, self.done_weight / (self.todo or 1)))

    def _say(self, line: str) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(line)
            terminal.flush()

    def pytest_sessionfinish(self) -> None:
        """Record what files took, where that was asked for."""
        if path := os.environ.get("SHARDTENSOR_TEST_SECONDS"):
            rows = [f"{spent:.0f} {file}" for file, spent in self.spent.most_common() if spent >= LEAST_S]
            Path(path).write_text("\n".join(["# seconds that a file takes, in one run on two cores", *rows, ""]))


def line_of(done: int, total: int, elapsed_s: float, share: float) -> str:
    """The line that is shown; `share` is the part of the work that is done.

    >>> line_of(2100, 7000, 80.0, 0.4)
    '2100/7000 tests, 1:20 elapsed, about 2:00 remaining'
    """
    remaining = f"about {_clock(elapsed_s * (1 - share) / share)}" if share > 0.01 else "an unknown time"
    return f"{done}/{total} tests, {_clock(elapsed_s)} elapsed, {remaining} remaining"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
