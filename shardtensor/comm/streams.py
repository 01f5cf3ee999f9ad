"""Side streams for collectives, beside the caller's stream; on the CPU there are none.

Every call of torch for the current stream takes host time. So it is read once for each pass; streams are switched and
events recorded without another such call.
"""

from __future__ import annotations

from typing import Any

import torch


class Streams:
    """The caller's stream, as of the last `refresh`, and streams beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self.caller: Any = None
        self.refresh()

    def refresh(self) -> bool:
        """Read the caller's stream from torch; return whether it has changed."""
        before = self.caller
        self.caller = torch.cuda.current_stream(self.device) if self.is_cuda else None
        return bool(before != self.caller)

    def stream(self) -> Stream:
        """Make a side stream."""
        return CudaStream(self) if self.is_cuda else Stream()

    def event(self) -> Any:
        """Make an event, for ``Stream.mark`` and `wait`; None on the CPU."""
        return torch.cuda.Event() if self.is_cuda else None

    def wait(self, event: Any) -> None:
        """Make the caller's stream wait for an event."""
        if self.is_cuda:
            self.caller.wait_event(event)


class Stream:
    """A stream with nothing to wait for, as on the CPU: work inside ``with`` runs in the caller's own stream."""

    def follow(self) -> None:
        """Make this stream wait for all work in the caller's stream."""

    def wait(self, event: Any) -> None:
        """Make this stream wait for an event."""

    def mark(self, event: Any) -> None:
        """Record an event in this stream."""

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor until this stream has done its work so far, also if the tensor is dropped."""

    def synchronize(self) -> None:
        """Make the host wait for this stream."""

    def join(self) -> None:
        """Make the caller's stream wait for this one."""

    def __enter__(self) -> None:
        """Make it the current stream."""

    def __exit__(self, *_: Any) -> None:
        return None


class CudaStream(Stream):
    """A CUDA stream other than the caller's."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._stream = streams, torch.cuda.Stream(streams.device)
        self._follows, self._joins = torch.cuda.Event(), torch.cuda.Event()
        self._is_joined = True  # the caller's stream waits for all of it; waiting again is an error in a capture

    def follow(self) -> None:
        self._is_joined = False
        self._follows.record(self._streams.caller)
        self._stream.wait_event(self._follows)

    def wait(self, event: Any) -> None:
        self._is_joined = False
        self._stream.wait_event(event)

    def mark(self, event: Any) -> None:
        event.record(self._stream)

    def uses(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def join(self) -> None:
        if not self._is_joined:
            self._is_joined = True
            self._joins.record(self._stream)
            self._streams.caller.wait_event(self._joins)

    def __enter__(self) -> None:
        _use(self._stream)

    def __exit__(self, *_: Any) -> None:
        _use(self._streams.caller)


def _use(stream: Any) -> None:
    torch._C._cuda_setStream(  # ten times faster than ``torch.cuda.stream``
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
