"""The buffers that parameters are gathered into: made once, used in turns; small units are gathered together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch

from shardtensor.comm.copy_engines import GatherBuffer, gather_buffer
from shardtensor.comm.group import Pending
from shardtensor.fsdp.state import SHARDED, FSDPState
from shardtensor.plan.match.units import convoys


class CopyOrder:
    """Copies groups from one order to the other, in one call.

    Args:
        chunks: elements of a rank's range of each group.
        whole: the groups end to end.
        sent: as many elements, of the same dtype.
    """

    def __init__(self, chunks: Sequence[int], whole: torch.Tensor, sent: torch.Tensor) -> None:
        grain, ranks = math.gcd(*chunks), whole.numel() // sum(chunks)
        numbers = torch.arange(whole.numel() // grain, device=whole.device).view(ranks, -1)
        parts = numbers.split([chunk // grain for chunk in chunks], 1)
        self._copied_out = torch.cat([part.reshape(-1) for part in parts])
        self._copied_in = torch.argsort(self._copied_out)
        self._whole, self._sent = (x.view(torch.uint8).view(-1, grain * x.itemsize) for x in (whole, sent))

    def copy_in(self) -> None:
        """Write what lies end to end as it is sent."""
        torch.index_select(self._whole, 0, self._copied_in, out=self._sent)

    def copy_out(self) -> None:
        """Write what was sent end to end."""
        torch.index_select(self._sent, 0, self._copied_out, out=self._whole)


class CoalescedGather:
    """Units of one group each, all gathered when the first of them is.

    Their ranges are sent side by side, and are copied to where each unit is gathered. Who holds what is as without it.
    """

    def __init__(self, states: Sequence[FSDPState]) -> None:
        self.states = list(states)
        self.param_groups = [state.param_groups[0] for state in states]
        first = self.param_groups[0]
        self._group = first.data_mesh.shard
        chunks = [group.ranges.chunk for group in self.param_groups]
        count, dtype = self._group.size * sum(chunks), first.compute_dtype
        self._sent, whole = (torch.empty(count, dtype=dtype, device=first.device) for _ in range(2))
        self._own = self._sent.view(self._group.size, -1)[self._group.index]
        self._order = CopyOrder(chunks, whole, self._sent)
        self.memory = whole.view(torch.uint8)
        self._started: Pending | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffers that its groups are sent in, and copied to."""
        return self._sent.nbytes + self.memory.nbytes

    def is_ready(self, is_again: bool) -> bool:
        """Whether all can be gathered: none is already, nor, to be gathered again, was written since."""
        if any([state.sharded_state is not SHARDED for state in self.states]):
            return False
        return not is_again or all([group.is_unwritten for group in self.param_groups])

    def gather(self) -> Pending:
        """Start to gather all; the caller chose the stream."""
        ranges = [group.present_range() for group in self.param_groups]
        torch.cat(ranges, out=self._own)
        self._started = self._group.all_gather_into(self._sent, self._own)
        if self._sent.is_cuda:
            self.wait()  # in the stream, that is
        return self

    def wait(self) -> torch.Tensor:
        """Let each unit have what was gathered of it."""
        started, self._started = self._started, None
        if started is not None:
            started.wait()
            self._order.copy_out()
        return self._sent


def coalesced_states(states: Sequence[FSDPState]) -> list[list[FSDPState]]:
    """The units that are coalesced, by what is known of them before their memory is assigned."""
    return [[states[i] for i in members] for members in convoys([_kind(state) for state in states])]


def _kind(state: FSDPState) -> tuple[Hashable, int] | None:
    is_small = state.stays_gathered and not state.is_container and state.reshard_after_forward is None
    if not is_small or state.is_asked or state.keeps_after_backward or len(state.param_groups) != 1:
        return None
    group, data_mesh = state.param_groups[0], state.data_mesh
    if group.is_offloaded or data_mesh.shard.size == 1 or not group.whole_bytes:
        return None
    ranks = (
        data_mesh.shard.ranks,
        None if data_mesh.replicate is None else data_mesh.replicate.ranks,
    )  # the same on all of them
    return (*ranks, group.dtype, group.compute_dtype, group.reduce_dtype), group.whole_bytes


_LINE = 512  # bytes; where a group begins in memory


class Buffer:
    """Memory for one gathered unit at a time."""

    def __init__(self, gathered: GatherBuffer) -> None:
        self.holder: FSDPState | None = None
        self.lease = gathered
        self._storage = gathered.memory.untyped_storage()
        self._users = 0

    def seal(self) -> None:
        """Count who refers to the memory now: those that it is assigned to."""
        self._users = self._count()

    @property
    def is_idle(self) -> bool:
        """Whether nobody else does: no graph waits for its backward."""
        return self._count() <= self._users

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))


@torch.inference_mode(False)  # else autograd would never take what lies in it, nor views of it
def assign_buffers(states: Sequence[FSDPState]) -> None:
    """Give every unit its memory: a buffer of its own where it has to stay gathered, else one of a ring in turns.

    The ring has a buffer for a unit that computes and for as many as are gathered ahead of it. Small units that are
    together lie end to end. All ranks call it; where the copy engines of GPUs can gather, the memory is made known to
    all.
    """
    ended = {id(state.buffer.lease): state.buffer.lease for state in states if state.buffer is not None}
    together = coalesced_states(states)
    coalesced_ids = {id(state) for members in together for state in members}
    depth = 1 + max([1, *(ahead for state in states for ahead in state.ahead)])
    sharers: list[list[FSDPState]] = [[] for _ in range(depth)]
    turn = 0
    for state in states:
        if state.has_own_buffer:
            sharers += [] if id(state) in coalesced_ids else [[state]]
        else:
            sharers[turn % depth].append(state)
            turn += 1
    _assign(sharers, states[0])
    for members in together:
        _assign_coalesced(CoalescedGather(members))
    for old in ended.values():
        old.end()


def _assign(sharers: Sequence[Sequence[FSDPState]], first: FSDPState) -> None:
    sizes = [max(map(_size, each), default=0) for each in sharers]
    gathered = gather_buffer(first.data_mesh.shard, sum(sizes), first.device)
    buffers = []
    start = 0
    for each, size in zip(sharers, sizes, strict=True):
        buffers.append(Buffer(gathered))
        for state in each:
            state.buffer = buffers[-1]
            place = start
            for group in state.param_groups:
                group.coalesced = None
                if group.data_mesh.shard is first.data_mesh.shard:
                    group.gathers_by = gathered.group
                group.use_buffer(gathered.memory[place:])
                group.make_views()
                place += _up(group.whole_bytes)
        start += size
    for buffer in buffers:
        buffer.seal()


def _assign_coalesced(coalesced: CoalescedGather) -> None:
    gathered = GatherBuffer(coalesced.param_groups[0].data_mesh.shard, coalesced.memory)
    place = 0
    for group in coalesced.param_groups:
        group.coalesced, group.gathers_by = coalesced, group.data_mesh.shard
        group.use_buffer(coalesced.memory[place:])
        place += group.whole_bytes
    coalesced.param_groups[0].make_views()
    for state in coalesced.states:
        state.buffer = Buffer(gathered)
    for state in coalesced.states:
        state.buffer.seal()


def _size(state: FSDPState) -> int:
    return sum(_up(group.whole_bytes) for group in state.param_groups)


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
