"""What runs inside of the changed process: pytest with a plugin that records, chooses or limits the tests."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import pickle
import sys
import threading
import time
from functools import reduce
from types import CodeType, FrameType
from typing import Any

import pytest

START_S = 90.0
"""More time for the first test on real ranks, whose processes start then and import torch."""

Lines = set[tuple[str, int]]


class Trace:
    """The lines of a folder of the package that run while it is entered, the first ones of its functions too."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.lines: Lines = set()
        self._calls: dict[CodeType, int] = {}

    def __enter__(self) -> Trace:
        _forget_cached()
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        _, found, name = code.co_filename.rpartition(f"/shardtensor/{self.folder}/")
        if not found:
            return None
        calls = self._calls[code] = self._calls.get(code, 0) + 1
        name = f"{self.folder}/{name}"
        self.lines.add((name, code.co_firstlineno))
        if calls > 30:  # has shown its ways
            return None

        def line(frame: FrameType, event: str, arg: object) -> Any:
            self.lines.add((name, frame.f_lineno))
            return line

        return line


def _forget_cached() -> None:
    """Clear the caches of the package, so that each test runs what it needs."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardtensor."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def traced_on_rank(what: tuple[str, str], folder: str, given: dict[str, Any]) -> tuple[Any, Lines]:
    """Run a body on a rank of the pool; return its result and the lines that ran."""
    module, name = what
    with Trace(folder) as trace:
        result = reduce(getattr, name.split("."), importlib.import_module(module))(**given)
    return result, trace.lines


class Recorder:
    """Records the time and the lines of every test."""

    def __init__(self, folder: str, path: str) -> None:
        self.folder, self.path = folder, path
        self.tests: dict[str, tuple[float, Lines]] = {}
        self.ran: Lines = set()

    def pytest_collection_finish(self) -> None:
        from harness import Pool

        run, recorder = Pool.__call__, self

        def call(pool: Pool, body: Any, size: int = 4, timeout_s: float = 60.0, **given: Any) -> list[Any]:
            job = {"what": (body.__module__, body.__qualname__), "folder": recorder.folder, "given": given}
            replies = run(pool, traced_on_rank, size, timeout_s * 3, **job)
            recorder.ran |= set().union(*(lines for _, lines in replies))
            return [result for result, _ in replies]

        Pool.__call__ = call  # type: ignore[method-assign]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.ran = set()
        start = time.monotonic()
        with Trace(self.folder) as trace:
            yield
        self.tests[item.nodeid] = time.monotonic() - start, trace.lines | self.ran

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            with open(self.path, "wb") as file:
                pickle.dump(self.tests, file)


def _is_on_real_ranks(item: Any) -> bool:
    kind = item.callspec.params.get("world") if hasattr(item, "callspec") else None
    return "world" in item.fixturenames and kind != "sim"


class Chooser:
    """Runs chosen tests in a given order, each for a limited time, and writes down the first that fails."""

    def __init__(self, limits: dict[str, float], path: str) -> None:
        self.limits, self.path = limits, path
        self.has_failed = self.has_started = False

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Any:
        yield
        order = {name: place for place, name in enumerate(self.limits)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._write(item.nodeid + " (did not end)")
        starts = not self.has_started and _is_on_real_ranks(item)
        faulthandler.dump_traceback_later(self.limits[item.nodeid] + START_S * starts, exit=True)
        self.has_started |= starts
        yield
        faulthandler.cancel_dump_traceback_later()
        if not self.has_failed:
            self._write("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.has_failed = True
            self._write(report.nodeid)

    def _write(self, text: str) -> None:
        with open(self.path, "w") as file:
            file.write(text)
