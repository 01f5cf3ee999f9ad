"""How far a run is and how long it will take: a line every quarter of a minute, in a log without a terminal, too.

``tests/seconds.txt`` holds how long tests take that take long, on average over their parameters. Files are run by this,
the longest first, so that no worker is left with a long one at the end; and what remains is estimated by it.
SHARDTENSOR_TEST_SECONDS=PATH writes such a file at the end of a run; one of a full run replaces that file.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

EVERY_S = 15.0
LEAST_S = 0.5  # tests that take less, with all of their parameters, are not recorded
OTHER_S = 0.02  # a test without a record
HEAD = ["# seconds that one test takes, on average over its parameters, where all take half a second or more"]
RECORDED = Path(__file__).parent.parent / "seconds.txt"


@cache
def recorded_seconds() -> dict[str, float]:
    """Seconds by test, as in ``tests/ops/test_views.py::test_views_equal_dense``."""
    lines = [line.split() for line in RECORDED.read_text().splitlines() if line and line[0] != "#"]
    return {test: float(seconds) for seconds, test in lines}


def bare_name(nodeid: str) -> str:
    """The test without its parameters."""
    return nodeid.partition("[")[0]


def weight_of(nodeid: str) -> float:
    """The seconds that a test is expected to take."""
    return recorded_seconds().get(bare_name(nodeid), OTHER_S)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def longest_first(nodeids: list[str]) -> dict[str, int]:
    """The place of each file in the order of a run."""
    seconds: Counter[str] = Counter()
    for nodeid in nodeids:
        seconds[file_of(nodeid)] += weight_of(nodeid)
    return {file: place for place, (file, _) in enumerate(seconds.most_common())}


class Progress:
    """A plugin of the process that reports: it counts the tests that are done, on all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start = self.last = time.monotonic()
        self.weight: dict[str, float] = {}  # by test
        self.todo = 0.0
        self.done = 0
        self.done_weight = 0.0
        self.spent: dict[str, Counter[str]] = defaultdict(Counter)  # by test, and by its parameters

    def _expect(self, nodeids: list[str]) -> None:
        if self.weight:
            return  # each worker collects all
        self.start = self.last = time.monotonic()
        self.weight = {nodeid: weight_of(nodeid) for nodeid in nodeids}
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
        self.spent[bare_name(report.nodeid)][report.nodeid] += report.duration
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
            long = [
                (spent.total() / len(spent), test) for test, spent in self.spent.items() if spent.total() >= LEAST_S
            ]
            rows = [f"{mean:.2f} {test}" for mean, test in sorted(long, reverse=True)]
            Path(path).write_text("\n".join([*HEAD, *rows, ""]))


def line_of(done: int, total: int, elapsed_s: float, share: float) -> str:
    """The line that is shown; `share` is the part of the work that is done.

    >>> line_of(2100, 7000, 80.0, 0.4)
    '2100/7000 tests, 1:20 elapsed, about 2:00 remaining'
    """
    remaining = f"about {_clock(elapsed_s * (1 - share) / share)}" if share > 0.01 else "an unknown time"
    return f"{done}/{total} tests, {_clock(elapsed_s)} elapsed, {remaining} remaining"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
