"""The buffers that parameters are gathered into: made once, used in turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.comm.copy_engines import GatherBuffer, gather_buffer
from shardtensor.fsdp.state import FSDPState
from shardtensor.layout.ranges import GATHER_BUFFERS, aligned_bytes, gather_buffers


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
