"""The side streams that gathers and reductions run in, beside the computation; on the CPU there are none."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class Lane:
    """A place in which work is put in order; this one is the caller's own, as on the CPU. `CudaLane` is a stream."""

    def follow(self) -> None:
        """What is put here from now on runs after all that the caller's stream holds by now."""

    def mark(self, event: Any) -> None:
        """Note in `event` what is here by now."""

    def join(self) -> None:
        """Let the caller's stream go on only after all that is here."""

    def __enter__(self) -> None:
        """Put the caller's work here."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class CudaLane(Lane):
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._contexts: list[Any] = []

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())

    def mark(self, event: Any) -> None:
        event.record(self.stream)

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)

    def __enter__(self) -> None:
        context = torch.cuda.stream(self.stream)
        context.__enter__()
        self._contexts.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.pop().__exit__(kind, error, trace)


class NoEvent:
    """What stands for an event where work is done when a call returns."""

    def wait(self) -> None:
        """There is nothing to wait for."""


def lane(device: torch.device) -> Lane:
    """A new lane for work on `device`."""
    return CudaLane(device) if device.type == "cuda" else Lane()


def event(device: torch.device) -> Any:
    """A new event, with ``wait()`` that lets the current stream wait for it."""
    return torch.cuda.Event() if device.type == "cuda" else NoEvent()


def current_stream(device: torch.device) -> Any:
    """What tells the caller's stream from others."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
