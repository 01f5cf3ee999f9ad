"""What the states of a model share: side streams, and the buffers that parameters are gathered into in turns.

Streams are those of all-gathers and reductions; on the CPU there are none. The host pays for every question that it
asks torch about the current stream, so that is asked once for each pass, and streams are changed and events recorded
without asking again. Buffers are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardtensor.comm.copy_engines import GatherBuffer, gather_buffer
from shardtensor.layout.ranges import GATHER_BUFFERS, aligned_bytes, gather_buffers

if TYPE_CHECKING:
    from shardtensor.fsdp.state import FSDPState


class Streams:
    """The caller's stream, as of the last `refresh`, and streams beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self.caller: Any = None
        self.refresh()

    def refresh(self) -> bool:
        """Ask for the caller's stream; return whether it is another than before."""
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
    """The caller's own stream, as on the CPU: there is nothing to wait for. Work inside ``with`` runs in it."""

    def follow(self) -> None:
        """Make this stream wait for all that the caller's has got."""

    def mark(self, event: Any) -> None:
        """Record an event here."""

    def synchronize(self) -> None:
        """Make the host wait for this stream."""

    def join(self) -> None:
        """Make the caller's stream wait for this one."""

    def __enter__(self) -> None:
        """Make it the current stream."""

    def __exit__(self, *_: Any) -> None:
        return None


class CudaStream(Stream):
    """A stream of its own."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._stream = streams, torch.cuda.Stream(streams.device)
        self._follows, self._joins = torch.cuda.Event(), torch.cuda.Event()
        self._is_joined = True  # the caller's stream waits for all of it; a capture refuses to wait again

    def follow(self) -> None:
        self._is_joined = False
        self._follows.record(self._streams.caller)
        self._stream.wait_event(self._follows)

    def mark(self, event: Any) -> None:
        event.record(self._stream)

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
    torch._C._cuda_setStream(  # ten times faster than the context that torch.cuda has
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


class Buffer:
    """Memory for one unsharded module at a time.

    Attributes:
        holder: the state that was gathered into it last.
        allocation: what it is a part of.
    """

    def __init__(self, allocation: GatherBuffer) -> None:
        self.holder: FSDPState | None = None
        self.allocation = allocation
        self._storage = allocation.memory.untyped_storage()
        self._users = 0

    def seal(self) -> None:
        """Count who refers to the memory now: the states that it is assigned to."""
        self._users = self._count()

    @property
    def is_idle(self) -> bool:
        """Whether nobody else does: no graph waits for its backward."""
        return self._count() <= self._users

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))


@torch.inference_mode(False)  # else autograd would never take what lies in it, nor views of it
def assign_buffers(states: Sequence[FSDPState]) -> None:
    """Give every state its buffer: one of its own where it has to stay unsharded, else one of a ring in turns.

    The ring has a buffer for a module that computes and for as many as are gathered ahead of it. All ranks call it:
    where the copy engines of GPUs can gather, the memory is registered with all.
    """
    old = {id(state.buffer.allocation): state.buffer.allocation for state in states if state.buffer is not None}
    depth = max([GATHER_BUFFERS, *(1 + ahead for state in states for ahead in state.ahead)])
    sizes = [[aligned_bytes(group.unsharded_bytes) for group in state.param_groups] for state in states]
    planned = gather_buffers([(sum(s), state.has_own_buffer) for s, state in zip(sizes, states, strict=True)], depth)
    shard = states[0].data_mesh.shard
    allocation = gather_buffer(shard, sum(each.size_bytes for each in planned), states[0].device)
    buffers, start = [], 0
    for each in planned:
        buffers.append(Buffer(allocation))
        for number in each.users:
            state, place = states[number], start
            state.buffer = buffers[-1]
            for group, size in zip(state.param_groups, sizes[number], strict=True):
                if group.data_mesh.shard is shard:
                    group.gathers_by = allocation.group
                group.use_buffer(allocation.memory[place:])
                group.make_views()
                place += size
        start += each.size_bytes
    for buffer in buffers:
        buffer.seal()
    for unused in old.values():
        unused.end()
