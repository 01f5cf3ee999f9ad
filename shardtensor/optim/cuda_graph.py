"""A function captured in a CUDA graph, and the end of such graphs before that of the process groups they call."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Recorder(Protocol):
    """Runs a function as it is, or records what it does to memory and does that again."""

    def run(self, function: Callable[[], Any]) -> Any: ...

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record what `function` does; return its result, whose tensors are filled by `replay`."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Let go of what was recorded."""


class CudaRecorder:
    """A `Recorder` on a stream of its own; what it runs is in order with the caller's current stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph: Any = None

    def run(self, function: Callable[[], Any]) -> Any:
        """Run it on the stream that captures: autograd remembers the stream that a gradient was first made on."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], Any]) -> Any:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.clear_autocast_cache()  # casts of weights that were made before would not be made again by a replay
        gc.collect()  # what were freed during the capture could be something that CUDA may not free then
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            # "thread_local": the threads of NCCL and of data loaders may go on asking CUDA for other things.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is invalid is known
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.clear_autocast_cache()
        self._graph = graph
        return result

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            torch.cuda.synchronize(self._device)
            graph.reset()


class Releasable(Protocol):
    """What holds graphs."""

    def release(self) -> None: ...


_live: weakref.WeakSet[Any] = weakref.WeakSet()
_is_watching = False


def release_before_groups(holder: Releasable) -> None:
    """Call ``holder.release()`` before any process group is shut down, and before the process ends.

    NCCL waits for ever for the end of a communicator that a graph still calls. `ProcessGroup.shutdown` is where all
    ways to destroy a group meet; it is wrapped at the first call of this function.
    """
    global _is_watching
    _live.add(holder)
    if _is_watching:
        return
    _is_watching = True
    atexit.register(release_all)
    if dist.is_available():
        shut_down = dist.ProcessGroup.shutdown

        def shutdown(self: dist.ProcessGroup) -> None:
            release_all()
            shut_down(self)

        dist.ProcessGroup.shutdown = shutdown  # type: ignore[method-assign]


def release_all() -> None:
    """Release the graphs of every living holder."""
    for holder in list(_live):
        holder.release()
