"""A bar for the bytes of a save or a load, on a terminal."""

from __future__ import annotations

import sys
from threading import Lock
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_SHOWN_FROM_BYTES = 1 << 30  # less takes about a second


class ByteProgress:
    """Shows how many of `total` bytes are done, if they are many, a person looks on, and `shown` is set."""

    def __init__(self, title: str, total: int, *, shown: bool) -> None:
        self._lock = Lock()
        self._bar: Progress | None = None
        if shown and total >= _SHOWN_FROM_BYTES and sys.stderr.isatty():
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"{title}, rank 0", total=total)

    def add(self, count: int) -> None:
        """Add bytes that are done; any thread calls it."""
        if self._bar is not None:
            with self._lock:
                self._bar.advance(self._task, count)

    def __enter__(self) -> ByteProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
