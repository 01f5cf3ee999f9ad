"""The side streams that gathers and reductions run in, beside the computation; on the CPU there are none.

The host pays for every question that it asks torch about the current stream, so that is asked once for each pass, and
streams are changed and events recorded without asking again.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class Streams:
    """The caller's stream, as of the last `refresh`, and streams beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.caller: Any = None
        self.refresh()

    def refresh(self) -> bool:
        """Ask for the caller's stream; return whether it is another than before."""
        before = self.caller
        self.caller = torch.cuda.current_stream(self.device) if self.is_cuda else None
        return bool(before != self.caller)

    def stream(self) -> Stream:
        """A new stream."""
        return CudaStream(self) if self.is_cuda else Stream()

    def event(self) -> Any:
        """A new event, for ``Stream.mark`` and `wait`."""
        return torch.cuda.Event() if self.is_cuda else None

    def wait(self, event: Any) -> None:
        """Let the caller's stream go on only after what was marked."""
        if self.is_cuda:
            self.caller.wait_event(event)


class Stream:
    """A place in which work is put in order; this one is the caller's own, as on the CPU. `CudaStream` is a stream."""

    def follow(self) -> None:
        """What is put here from now on runs after all that the caller's stream holds by now."""

    def mark(self, event: Any) -> None:
        """Note in `event` what is here by now."""

    def synchronize(self) -> None:
        """Let the host wait for all that is here."""

    def join(self) -> None:
        """Let the caller's stream go on only after all that is here."""

    def __enter__(self) -> None:
        """Put the caller's work here."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class CudaStream(Stream):
    """A stream of its own."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.stream = torch.cuda.Stream(streams.device)
        self._follows, self._joins = torch.cuda.Event(), torch.cuda.Event()
        self._is_joined = True  # what was put here is behind what the caller waits for; a capture refuses to wait again

    def follow(self) -> None:
        self._is_joined = False
        self._follows.record(self._streams.caller)
        self.stream.wait_event(self._follows)

    def mark(self, event: Any) -> None:
        event.record(self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def join(self) -> None:
        if self._is_joined:
            return
        self._is_joined = True
        self._joins.record(self.stream)
        self._streams.caller.wait_event(self._joins)

    def __enter__(self) -> None:
        _use(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _use(self._streams.caller)


def _use(stream: Any) -> None:
    torch._C._cuda_setStream(  # ten times faster than the context that torch.cuda has
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
