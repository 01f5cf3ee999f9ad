"""A `Group` that has its ranks meet before each collective: the agreement mode.

Meant for finding a fault, not for training. Two gloo ranks on one machine pay 0.2 to 0.6 ms for each collective, beside
the 1.2 ms of an all-reduce of four elements there; a store on another machine adds two or three round trips. The ranks
wait for each other on the host, so a collective that was started is one that all ranks have reached, and they have to
call their collectives in one order over all groups. Compiled graphs and pretended ("fake") groups are not checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from threading import main_thread
from typing import Any

import torch

from shardtensor.comm.agree import agree
from shardtensor.comm.board import board_of_world
from shardtensor.comm.call_site import call_site, user_call
from shardtensor.comm.group import Group, Pending
from shardtensor.comm.meeting import Meeting, pair_sum
from shardtensor.comm.parted import Parted
from shardtensor.comm.primitives import timeout_of
from shardtensor.errors import SpecError
from shardtensor.mesh import Mesh

_SHOWN_COUNTS = 16
_wanted = False

WHEN_CHECKED: list[Callable[[], None]] = []
"""Called once, when the first group with checks is made: what else is to be checked then."""


def check_collectives() -> None:
    """Check every collective of this program: as ``SHARDTENSOR_CHECK=collectives`` in the environment.

    Each is tagged with the call and the line that made it, the module whose forward it is part of, its operation,
    dtype and counts. At the first one that is not the same on all its ranks every rank raises, naming all calls;
    ranks that do not come are named, with what they do instead, before the timeout of the group is over. A plain tensor
    that meets a sharded one in an operation has to be a copy, bit for bit: each is compared by a checksum.

    Call it on every rank before the first tensor is made; groups that are in use already stay as they are.

    Example:
        >>> import shardtensor
        >>> shardtensor.check_collectives()  # doctest: +SKIP
    """
    global _wanted
    _wanted = True


def are_collectives_checked() -> bool:
    """Whether groups shall be made with checks.

    Raises:
        SpecError: (a ValueError) the environment asks for a check that does not exist.
    """
    asked = os.environ.get("SHARDTENSOR_CHECK", "")
    if asked not in ("", "collectives"):
        raise SpecError(f"SHARDTENSOR_CHECK knows no check called `{asked}`", fix="SHARDTENSOR_CHECK=collectives")
    return _wanted or asked == "collectives"


class CheckedGroup(Parted):
    """The group it is given, with checks; `as_group` makes it."""

    def __init__(self, group: Group, meeting: Meeting) -> None:
        super().__init__()
        self.size, self.rank, self.ranks, self.index = group.size, group.rank, group.ranks, group.index
        self.device_type, self.process_group, self.mesh = group.device_type, group.process_group, group.mesh
        self._group, self._meeting = group, meeting
        self._twin: CheckedGroup | None = None
        while WHEN_CHECKED:
            WHEN_CHECKED.pop()()

    @classmethod
    def over(cls, group: Group) -> CheckedGroup:
        """Check the group of a process group. All its ranks call it; sends nothing."""
        name = f"process group {group.process_group.group_name}"
        return cls(group, Meeting(board_of_world(), name, group.ranks, timeout_of(group.process_group)))

    def _meet(self, what: str, pairs: tuple[Sequence[int], Sequence[int]] | None = None) -> None:
        if not torch.compiler.is_compiling():
            _meet(self._meeting, what, pairs)

    def compare(self, what: str, facts: dict[str, str]) -> None:
        """Raise on every rank where what ranks say of plain operands differs; `what` is said in the error."""
        self._meet(f"plain {', '.join(facts)}")
        agree(self._group, what, facts)

    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        self._meet(f"all_reduce {op} of {_say(t)}")
        return self._group.all_reduce(t, op)

    def all_reduce_async(self, t: torch.Tensor, op: str = "sum") -> Pending:
        self._meet(f"all_reduce_async {op} of {_say(t)}")
        return self._group.all_reduce_async(t, op)

    def all_gather(self, t: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        self._meet(f"all_gather {_say(t, counts)}")
        return self._group.all_gather(t, counts)

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        self._meet(f"reduce_scatter {_say(flat, counts)}")
        return self._group.reduce_scatter(flat, counts)

    def reduce_scatter_async(self, flat: torch.Tensor, counts: Sequence[int] | None = None) -> Pending:
        self._meet(f"reduce_scatter_async {_say(flat, counts)}")
        return self._group.reduce_scatter_async(flat, counts)

    def all_gather_into(self, out: torch.Tensor, part: torch.Tensor) -> Pending:
        self._meet(f"all_gather_into {_say(part)}")
        return self._group.all_gather_into(out, part)

    def reduce_scatter_into(self, out: torch.Tensor, flat: torch.Tensor) -> Pending:
        self._meet(f"reduce_scatter_into {_say(flat)}")
        return self._group.reduce_scatter_into(out, flat)

    def all_to_all(
        self,
        flat: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._meet(f"all_to_all {_name(flat.dtype)}", (send_counts, recv_counts))
        return self._group.all_to_all(flat, send_counts, recv_counts, out)

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, count: int, src_index: int, like: torch.Tensor
    ) -> torch.Tensor:
        sent, received = [0] * self.size, [0] * self.size
        received[src_index] = count
        if self.index == src_index and parts is not None:
            sent = [part.numel() for part in parts]
        self._meet(f"scatter {_name(like.dtype)} from rank {self.ranks[src_index]}", (sent, received))
        return self._group.scatter(parts, count, src_index, like)

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        self._meet(f"broadcast {_say(t)} from rank {self.ranks[src_index]}")
        return self._group.broadcast(t, src_index)

    def exchange(self, blob: bytes) -> list[bytes]:
        self._meet(f"exchange {len(blob)} bytes")
        return self._group.exchange(blob)

    def exchange_objects(self, value: Any) -> list[Any]:
        self._meet("exchange_objects")
        return self._group.exchange_objects(value)

    def barrier(self) -> None:
        self._meet("barrier")
        self._group.barrier()

    def twin(self) -> Group:
        if self._twin is None:
            own = self._meeting
            meeting = Meeting(own.board, f"twin of {own.name}", own.ranks, own.timeout_s)
            _meet(meeting, "twin")
            self._twin = CheckedGroup(self._group.twin(), meeting)
        return self._twin

    subgroup, axis = Parted.subgroup, Parted.axis  # of checked groups: `_make_subgroup` checks what it makes

    def _make_subgroup(self, ranks: tuple[int, ...]) -> Group:
        if len(ranks) == self.size:
            return self
        if len(ranks) == 1 or self.rank not in ranks:
            return self._group.subgroup(ranks)
        meeting = Meeting(self._meeting.board, f"part of {self._meeting.name}", ranks, self._meeting.timeout_s)
        _meet(meeting, f"new_group {len(ranks)} ranks")  # torch would look for a missing member for minutes
        return CheckedGroup(self._group.subgroup(ranks), meeting)

    def on_mesh(self, mesh: Mesh, axes: dict[tuple[str, ...], Group]) -> CheckedGroup:
        group = CheckedGroup(self._group.on_mesh(mesh, axes), self._meeting)
        group._seen(self, mesh, axes)
        return group

    def __repr__(self) -> str:
        return f"CheckedGroup({self._group!r})"


def _meet(meeting: Meeting, what: str, pairs: tuple[Sequence[int], Sequence[int]] | None = None) -> None:
    """Meet for a collective of the caller's caller. `what` is equal on all ranks, and begins with the operation.

    Args:
        pairs: how many elements this rank sends to and receives from each.
    """
    frame, node = sys._getframe(2), torch._C._current_autograd_node()
    asked = user_call(frame)
    if node is not None:
        if not asked:  # on cuda the backward has a thread of its own, while the user's waits
            frame = sys._current_frames().get(main_thread().ident or 0, frame)
        asked = f"backward of {node.name().strip('_').removesuffix('Backward')}"
    operation = what.split()[0]
    call = f"{what if asked in ('', operation) else f'{asked}: {what}'}\n{call_site(frame)}"
    if pairs is None:
        meeting.meet(asked or operation, call)
    else:
        own = f"{call}\nsends {_counts(pairs[0])}, receives {_counts(pairs[1])}"
        meeting.meet(asked or operation, call, pair_sum(meeting.ranks, meeting.board.rank, *pairs), own)


def _say(t: torch.Tensor, counts: Sequence[int] | None = None) -> str:
    return f"{t.numel() if counts is None else _counts(counts)} {_name(t.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counts(counts: Sequence[int]) -> str:
    if len(counts) <= _SHOWN_COUNTS:
        return "+".join(map(str, counts))
    return f"{sum(counts)} in {len(counts)} parts (#{hash(tuple(counts)) & 0xFFFF:04x})"
