"""Memory of every rank of a group that all of them can write to: GPUs of one host that reach each other directly.

torch calls it symmetric memory. It is made when it is first of use, and differs from messages in speed alone: where any
rank of a group cannot have it, or ``SHARDTENSOR_PEER_MEMORY=off`` is in its environment, none of them uses it. A rank
that waits for one that does not come ends with a CUDA error after the timeout of the process group.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardtensor.comm.group import Group
from shardtensor.comm.primitives import timeout_of
from shardtensor.errors import SpecError

MOST_BYTES = 1 << 29
"""The most that a rank sets aside for a group."""
MOST_RANKS = 16
"""Groups of more ranks do not use it: a host has no more GPUs that reach each other, and each maps all the others."""

Job = Callable[[], object]


def peer_memory(group: Group) -> PeerMemory | None:
    """The memory of a group whose ranks may have some; None inside of a compiled graph.

    A checked group, which has its ranks meet before they communicate, and a simulated one have none.
    """
    return None if torch.compiler.is_compiling() else getattr(group, "peer_memory", None)


def is_wanted() -> bool:
    """Whether this rank's environment lets it use such memory.

    Raises:
        SpecError: (a ValueError) ``SHARDTENSOR_PEER_MEMORY`` is neither ``on`` nor ``off``.
    """
    asked = os.environ.get("SHARDTENSOR_PEER_MEMORY", "on")
    if asked not in ("on", "off"):
        raise SpecError(
            f"SHARDTENSOR_PEER_MEMORY is `{asked}`", fix=["SHARDTENSOR_PEER_MEMORY=on", "SHARDTENSOR_PEER_MEMORY=off"]
        )
    return asked == "on"


class PeerMemory:
    """The memory of one group: as many bytes on every rank, for one exchange at a time.

    Nothing is set aside before `has_room` is first asked. Whoever uses it may be on any stream: one use waits for the
    last.

    Attributes:
        device: of this rank's memory, once it has some.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self._wanted = is_wanted()
        self._refused = False
        self._size = 0
        self._own: torch.Tensor | None = None  # holds the memory; `_handle` knows where that of the others is
        self._handle: Any = None
        self._rooms: list[torch.Tensor] = []
        self._timeout_ms = 0
        self._last: torch.cuda.Event | None = None  # after the last use, and on which stream that was
        self._last_on: torch.cuda.Stream | None = None

    def has_room(self, size: int, group: Group, device: torch.device) -> bool:
        """Whether every rank has `size` bytes. All ranks ask alike; where memory must be found first, they talk.

        While a CUDA graph is captured nobody has any: it would hold addresses of memory that may be found anew.

        Args:
            device: where this rank has its tensors.
        """
        if torch.cuda.is_current_stream_capturing():
            return False
        if size > self._size and not self._refused:
            self._refused = not self._make(min(max(size, 2 * self._size), MOST_BYTES), group, device)
            if self._refused:
                self._forget()
        return size <= self._size

    def room(self, index: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of the memory of a member, from byte `start` on."""
        return self._rooms[index][start : start + numel * dtype.itemsize].view(dtype)

    def swap(self, write: Job, read: Job) -> None:
        """Run `write` once all ranks have read what came last, and `read` once all have written.

        All ranks call it. What is run only starts copies on the current stream: a stream for each peer was tried and
        cost the host more than it saved.
        """
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self._last is None:
                self._last = torch.cuda.Event()
            elif stream != self._last_on:
                stream.wait_event(self._last)
            self._barrier()
            write()
            self._barrier()
            read()
            self._last_on = stream
            stream.record_event(self._last)

    def _barrier(self) -> None:
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)

    # -- how it comes about -------------------------------------------------------------------------------------

    def _make(self, size: int, group: Group, device: torch.device) -> bool:
        """Find memory on every rank. Each way to fail is agreed upon before anyone waits for a rank that failed."""
        if self._handle is None:
            self.device = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
            there = group.exchange_objects(_whereabouts(self.device) if self._wanted else None)
            if not _all_say(group, _reaches(there, self.device)):
                return False
        self._forget()
        if not _all_say(group, self._allocate(size)) or not _all_say(group, self._connect(group.process_group)):
            return False
        self._size, self._timeout_ms = size, int(timeout_of(group.process_group) * 1000)
        return True

    def _forget(self) -> None:
        self._rooms, self._handle, self._own, self._size = [], None, None, 0

    def _allocate(self, size: int) -> bool:
        from torch._C._distributed_c10d import _SymmetricMemory

        for _ in range(2):
            try:  # not from a pool, where it would stay after growth
                self._own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self.device)
            except RuntimeError:
                torch.cuda.empty_cache()  # it does not come from torch's allocator, which may hold what is left
            else:
                return True
        return False

    def _connect(self, process_group: Any) -> bool:
        from torch.distributed._symmetric_memory import rendezvous

        assert self._own is not None
        try:
            with _without_multicast():
                self._handle = handle = rendezvous(self._own, process_group.group_name)
            sizes = (self._own.numel(),)
            with torch.inference_mode(False):  # to be written to later in any mode
                self._rooms = [handle.get_buffer(peer, sizes, torch.uint8) for peer in range(handle.world_size)]
        except RuntimeError:
            return False
        return True


def _all_say(group: Group, verdict: bool) -> bool:
    return b"\0" not in group.exchange(b"\1" if verdict else b"\0")


def _whereabouts(device: torch.device) -> tuple[Any, ...] | None:
    """What tells this rank's host and GPU apart from those of others; None where it can have no such memory."""
    try:
        from torch.distributed._symmetric_memory import get_backend

        if get_backend(device) != "CUDA":
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        # Handles of memory go from process to process by a socket in a folder for temporary files.
        folders = [os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR")]
        host = (socket.gethostname(), boot, os.readlink("/proc/self/ns/mnt"), os.readlink("/proc/self/ns/pid"), folders)
        return host, device.index, _name_of(device.index)
    except (ImportError, OSError, AttributeError, RuntimeError):
        return None


def _name_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _reaches(there: Sequence[Any], device: torch.device) -> bool:
    """Whether all ranks are on this host, each with a GPU of its own, and this rank's GPU reaches all the others."""
    if None in there or len({index for _, index, _ in there}) < len(there):
        return False
    if any(host != there[0][0] for host, _, _ in there):
        return False
    others = [(index, name) for _, index, name in there if index != device.index]
    count = torch.cuda.device_count()
    return all(
        index < count and _name_of(index) == name and torch.cuda.can_device_access_peer(device, index)
        for index, name in others
    )


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Writes go to one peer each: a multicast mapping, which not every host can make, would be of no use."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
