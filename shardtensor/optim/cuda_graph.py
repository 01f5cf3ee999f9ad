"""Capture of a function in a CUDA graph; graphs are released before the process groups of their collectives."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist


class CudaRecorder:
    """Captures a function in a graph, on a stream of its own that is ordered with the caller's current stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph: Any = None

    def run(self, function: Callable[[], Any]) -> Any:
        """Run it on the capture stream: autograd uses the stream on which a gradient was first made."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def capture(self, function: Callable[[], Any]) -> Any:
        """Capture `function`; return its result, whose tensors `replay` overwrites."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.clear_autocast_cache()  # else a replay would not repeat the casts of weights that are cached
        gc.collect()  # so that no object is freed during the capture that CUDA cannot free then
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            # "thread_local": the threads of NCCL and of data loaders may call CUDA meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # it raises because the capture is invalid
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.clear_autocast_cache()
        self._graph = graph
        return result

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        """Free the captured graph."""
        graph, self._graph = self._graph, None
        if graph is not None:
            torch.cuda.synchronize(self._device)
            graph.reset()


_live: weakref.WeakSet[Any] = weakref.WeakSet()
_is_watching = False


def release_before_groups(holder: Any) -> None:
    """Call ``holder.release()`` before any process group is shut down, and before the process ends.

    NCCL waits for ever when it destroys a communicator that a graph still uses. All ways to destroy a group call
    `ProcessGroup.shutdown`, which the first call of this function wraps.
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
    """Call ``release`` of every holder that still exists."""
    for holder in list(_live):
        holder.release()
