"""Agreement mode: a `Group` whose ranks compare their calls before each collective, for debugging.

The ranks wait for each other on the host, so they have to call the collectives of all groups in one order. Compiled
graphs and groups of the backend "fake" are not checked.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from threading import main_thread
from typing import Any

import torch
from torch import Tensor

from shardtensor.comm.agree import agree
from shardtensor.comm.call_site import call_site, user_call
from shardtensor.comm.group import Counts, Group, Pending
from shardtensor.comm.primitives import timeout_of
from shardtensor.comm.rendezvous import Rendezvous, pair_sum, world_status_store
from shardtensor.errors import SpecError
from shardtensor.layout.explain import dtype_name

_SHOWN_COUNTS = 16
_is_requested = False

WHEN_CHECKED: list[Callable[[], None]] = []
"""Functions to call once, when the first checked group is made; they switch on further checks."""


def check_collectives() -> None:
    """Check every collective of this program; ``SHARDTENSOR_CHECK=collectives`` in the environment does the same.

    Before each collective the ranks compare the call and the line that made it, the module whose forward it is part
    of, the operation, the dtype and the counts. If they differ, every rank raises an error that names all calls. If a
    rank does not join, the others raise an error before the timeout of the group, which shows what that rank does
    instead. A plain tensor used in an operation with a sharded one must be the same on all ranks, bit for bit: the
    ranks compare a checksum.

    Call it on every rank before the first tensor is made; groups that are already in use are not checked.

    Example:
        >>> import shardtensor
        >>> shardtensor.check_collectives()  # doctest: +SKIP
    """
    global _is_requested
    _is_requested = True


def are_collectives_checked() -> bool:
    """Whether new groups check their collectives.

    Raises:
        SpecError: (a ValueError) the environment names a check that does not exist.
    """
    name = os.environ.get("SHARDTENSOR_CHECK", "")
    if name not in ("", "collectives"):
        raise SpecError(f"SHARDTENSOR_CHECK knows no check called `{name}`", fix="SHARDTENSOR_CHECK=collectives")
    return _is_requested or name == "collectives"


def _checked(name: str, describe: Callable[..., str]) -> Any:
    """Return the method of `CheckedGroup` that checks and makes a call; `describe` returns its arguments as text."""

    def method(self: CheckedGroup, *args: Any, **kwargs: Any) -> Any:
        self._check(f"{name} {describe(*args, **kwargs)}".rstrip())
        return getattr(self._group, name)(*args, **kwargs)

    method.__signature__ = inspect.signature(getattr(Group, name))  # type: ignore[attr-defined]
    method.__code__ = method.__code__.replace(co_name=name)  # errors take the name of the call from it
    return method


class CheckedGroup(Group):
    """A group that waits at a rendezvous before each collective of another one; `as_group` makes it."""

    def __init__(self, group: Group, rendezvous: Rendezvous) -> None:
        super().__init__()
        self.size, self.rank, self.ranks, self.index = group.size, group.rank, group.ranks, group.index
        self.device_type, self.process_group, self.mesh = group.device_type, group.process_group, group.mesh
        self._group, self._rendezvous = group, rendezvous
        self._separate: CheckedGroup | None = None
        while WHEN_CHECKED:
            WHEN_CHECKED.pop()()

    @classmethod
    def over(cls, group: Group) -> CheckedGroup:
        """Wrap the group of a process group. All its ranks call it; sends nothing."""
        name = f"process group {group.process_group.group_name}"
        return cls(group, Rendezvous(world_status_store(), name, group.ranks, timeout_of(group.process_group)))

    def _check(self, what: str, pairs: tuple[Sequence[int], Sequence[int]] | None = None) -> None:
        if not torch.compiler.is_compiling():
            _wait(self._rendezvous, what, pairs)

    def compare(self, what: str, facts: dict[str, str]) -> None:
        """Raise on every rank if facts about plain operands differ between ranks; `what` names the call."""
        self._check(f"plain {', '.join(facts)}")
        agree(self._group, what, facts)

    all_reduce = _checked("all_reduce", lambda t, op="sum": f"{op} of {_describe(t)}")
    all_reduce_async = _checked("all_reduce_async", lambda t, op="sum": f"{op} of {_describe(t)}")
    all_gather = _checked("all_gather", lambda t, counts=None: _describe(t, counts))
    reduce_scatter = _checked("reduce_scatter", lambda flat, counts=None: _describe(flat, counts))
    reduce_scatter_async = _checked("reduce_scatter_async", lambda flat, counts=None: _describe(flat, counts))
    all_gather_into = _checked("all_gather_into", lambda out, part: _describe(part))
    reduce_scatter_into = _checked("reduce_scatter_into", lambda out, flat, op="sum": _describe(flat))
    exchange = _checked("exchange", lambda blob: f"{len(blob)} bytes")
    exchange_objects = _checked("exchange_objects", lambda value: "")
    barrier = _checked("barrier", lambda: "")

    def all_to_all(self, flat: Tensor, send_counts: Counts, recv_counts: Counts, out: Tensor | None = None) -> Tensor:
        self._check(f"all_to_all {dtype_name(flat.dtype)}", (send_counts, recv_counts))
        return self._group.all_to_all(flat, send_counts, recv_counts, out)

    def broadcast(self, t: torch.Tensor, src_index: int = 0) -> torch.Tensor:
        self._check(f"broadcast {_describe(t)} from rank {self.ranks[src_index]}")
        return self._group.broadcast(t, src_index)

    def broadcast_async(self, t: torch.Tensor, src_index: int = 0) -> Pending:
        self._check(f"broadcast_async {_describe(t)} from rank {self.ranks[src_index]}")
        return self._group.broadcast_async(t, src_index)

    def with_new_communicator(self) -> Group:
        if self._separate is None:
            own = self._rendezvous
            rendezvous = Rendezvous(own.statuses, f"new communicator of {own.name}", own.ranks, own.timeout_s)
            _wait(rendezvous, "with_new_communicator")
            self._separate = CheckedGroup(self._group.with_new_communicator(), rendezvous)
        return self._separate

    def for_other_thread(self) -> Group | None:
        self._check("for_other_thread")
        return self._group.for_other_thread()  # not checked: ranks would have to call it in one order with the others

    def _make_subgroup(self, ranks: tuple[int, ...]) -> Group:
        own = self._rendezvous
        rendezvous = Rendezvous(own.statuses, f"part of {own.name}", ranks, own.timeout_s)
        _wait(rendezvous, f"new_group {len(ranks)} ranks")  # torch would wait for a missing member for minutes
        return CheckedGroup(self._group.subgroup(ranks), rendezvous)

    def __repr__(self) -> str:
        return f"CheckedGroup({self._group!r})"


def _wait(rendezvous: Rendezvous, what: str, pairs: tuple[Sequence[int], Sequence[int]] | None = None) -> None:
    """Wait for all ranks before a collective of the caller's caller.

    `what` is equal on all ranks, its first word the operation; `pairs` are the elements that this rank sends to each
    member and receives from it.
    """
    frame, node = sys._getframe(2), torch._C._current_autograd_node()
    called = user_call(frame)
    if node is not None:
        if not called:  # on cuda the backward runs in another thread, while the user's waits
            frame = sys._current_frames().get(main_thread().ident or 0, frame)
        called = f"backward of {node.name().strip('_').removesuffix('Backward')}"
    operation = what.split()[0]
    call = f"{what if called in ('', operation) else f'{called}: {what}'}\n{call_site(frame)}"
    if pairs is None:
        rendezvous.wait(called or operation, call)
    else:
        own = f"{call}\nsends {_counts(pairs[0])}, receives {_counts(pairs[1])}"
        balance = pair_sum(rendezvous.ranks, rendezvous.statuses.rank, *pairs)
        rendezvous.wait(called or operation, call, balance, own)


def _describe(t: torch.Tensor, counts: Sequence[int] | None = None) -> str:
    return f"{t.numel() if counts is None else _counts(counts)} {dtype_name(t.dtype)}"


def _counts(counts: Sequence[int]) -> str:
    if len(counts) <= _SHOWN_COUNTS:
        return "+".join(map(str, counts))
    return f"{sum(counts)} in {len(counts)} parts (#{hash(tuple(counts)) & 0xFFFF:04x})"
