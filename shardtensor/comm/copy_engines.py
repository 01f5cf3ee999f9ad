"""Gathers that take no multiprocessor: NCCL lets the copy engines of the GPUs do them, into memory registered for it.

A product that runs beside an ordinary all-gather loses the multiprocessors that NCCL takes, about as much time as the
gather lasts. NCCL 2.28 gathers with copy engines where the communicator was made for it (``cta_policy``), the memory is
registered with it on all ranks, and the ranks are GPUs of one host that see each other. Nothing else may use such
memory in a collective of another communicator.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist

from shardtensor.comm import primitives
from shardtensor.comm.group import Group
from shardtensor.comm.torch_group import TorchGroup

_NO_MULTIPROCESSORS = 2  # NCCL_CTA_POLICY_ZERO
_SWITCH = "SHARDTENSOR_COPY_ENGINES"


def _nothing() -> None:
    """What there is to do where no memory was registered."""


@attrs.frozen(eq=False)
class Lease:
    """Memory to gather into, as bytes, and the group to gather by.

    Call `end` when nothing lies in the memory any more: it is then no longer registered, and can be freed.
    """

    group: Group
    memory: torch.Tensor
    end: Callable[[], None] = _nothing


def lease(group: Group, size_bytes: int, device: torch.device) -> Lease:
    """Return memory to gather into, and what gathers into it. All members call it with equal sizes.

    Gather in a stream other than the default one: CUDA refuses batches of copies there ("invalid argument").

    Both are what they would be without this module where copy engines cannot be used, or where the environment says
    ``SHARDTENSOR_COPY_ENGINES=0``.

    References:
        NCCL 2.28 release notes, "copy engine based collectives".
    """
    inner = getattr(group, "_group", group)  # of a group whose collectives are checked
    can_ask = size_bytes and device.type == "cuda"
    if not can_ask or not isinstance(inner, TorchGroup) or not _all_can(inner, device):
        return Lease(group, torch.empty(size_bytes, dtype=torch.uint8, device=device))
    if inner not in _gatherers:
        _gatherers[inner] = _gatherer(inner, device)
    gatherer = _gatherers[inner]
    backend: Any = gatherer.process_group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    backend.register_mem_pool(pool, symm=True)
    return Lease(gatherer, memory, lambda: backend.deregister_mem_pool(pool))


_gatherers: WeakKeyDictionary[TorchGroup, TorchGroup] = WeakKeyDictionary()


def _gatherer(group: TorchGroup, device: torch.device) -> TorchGroup:
    """A group of the same ranks whose communicator uses copy engines where it can."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = _NO_MULTIPROCESSORS  # type: ignore[attr-defined]
    made = primitives.new_group(tuple(group.ranks), primitives.timeout_of(group.process_group), options)
    primitives.all_reduce(made, torch.zeros(1, device=device), "sum")  # NCCL connects in its first call
    return TorchGroup(made)


def _all_can(group: TorchGroup, device: torch.device) -> bool:
    """Whether every member is a GPU of one host, and has what it takes. Collective."""
    version = torch.cuda.nccl.version() if group.wire.backends.get("cuda") == "nccl" else (0, 0, 0)
    devices = range(torch.cuda.device_count())
    can = (
        os.environ.get(_SWITCH, "1") != "0"
        and version >= (2, 28, 0)
        and hasattr(dist.ProcessGroupNCCL.Options().config, "cta_policy")
        and list(group.ranks) == sorted(group.ranks)
        and all(torch.cuda.can_device_access_peer(device, other) for other in devices if other != device.index)
    )
    host = f"{socket.gethostname()} {can}".encode()[-64:].rjust(64)
    answers = group.exchange(host)
    return can and set(answers) == {host}
