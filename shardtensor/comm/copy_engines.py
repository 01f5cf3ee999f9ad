"""All-gathers by the copy engines of GPUs, which use no multiprocessors, into memory registered with NCCL.

An ordinary all-gather uses multiprocessors, and slows a matmul that runs at the same time by about the time that the
gather takes. NCCL 2.28 gathers with copy engines if the communicator was made for it (``cta_policy``), the memory is
registered with it on all ranks, and the ranks are GPUs of one host with peer access. Collectives of other
communicators must not use this memory.
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


@attrs.frozen(eq=False)
class GatherBuffer:
    """Memory to gather into, as bytes, and the group whose all-gather to use. Call `end` when the memory is no
    longer used: it ends the registration, so that the memory can be freed."""

    group: Group
    memory: torch.Tensor
    end: Callable[[], None] = lambda: None


class Buffer:
    """Memory for one unsharded module at a time.

    Attributes:
        holder: the module state that was gathered into it last.
        allocation: what it is a part of.
    """

    def __init__(self, allocation: GatherBuffer) -> None:
        self.holder: Any = None
        self.allocation = allocation
        self._storage = allocation.memory.untyped_storage()
        self._users = 0

    def count_users(self) -> None:
        """Record how many references to the memory exist now: those of the states that use it."""
        self._users = self._count()

    @property
    def is_idle(self) -> bool:
        """Whether nothing else refers to it: no graph waits for its backward."""
        return self._count() <= self._users

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))


def gather_buffer(group: Group, size_bytes: int, device: torch.device) -> GatherBuffer:
    """Return memory to gather into, and the group whose all-gather to use. All members call it with equal sizes.

    Gather in a stream other than the default one: CUDA refuses batches of copies there ("invalid argument"). If copy
    engines cannot be used, or with ``SHARDTENSOR_COPY_ENGINES=0`` in the environment, it returns ordinary memory and
    `group` itself. See NCCL 2.28 release notes, "copy engine based collectives".
    """
    inner = getattr(group, "_group", group)  # a CheckedGroup's
    is_cuda = size_bytes and device.type == "cuda"
    if not is_cuda or not isinstance(inner, TorchGroup) or not _all_can(inner, device):
        return GatherBuffer(group, torch.empty(size_bytes, dtype=torch.uint8, device=device))
    if inner not in _gatherers:
        _gatherers[inner] = _gatherer(inner, device)
    gatherer = _gatherers[inner]
    backend: Any = gatherer.process_group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    backend.register_mem_pool(pool, symm=True)
    return GatherBuffer(gatherer, memory, lambda: backend.deregister_mem_pool(pool))


_gatherers: WeakKeyDictionary[TorchGroup, TorchGroup] = WeakKeyDictionary()


def _gatherer(group: TorchGroup, device: torch.device) -> TorchGroup:
    """Return a group of the same ranks whose communicator uses copy engines."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = _NO_MULTIPROCESSORS  # type: ignore[attr-defined]
    made = primitives.new_group(tuple(group.ranks), primitives.timeout_of(group.process_group), options)
    primitives.all_reduce(made, torch.zeros(1, device=device), "sum")  # NCCL connects in the first call
    return TorchGroup(made)


def _all_can(group: TorchGroup, device: torch.device) -> bool:
    """Whether copy engines can be used: all members are GPUs of one host and fulfil the conditions. Collective."""
    version = torch.cuda.nccl.version() if group.support.backends.get("cuda") == "nccl" else (0, 0, 0)
    devices = range(torch.cuda.device_count())
    can_use = (
        os.environ.get(_SWITCH, "1") != "0"
        and version >= (2, 28, 0)
        and hasattr(dist.ProcessGroupNCCL.Options().config, "cta_policy")
        and list(group.ranks) == sorted(group.ranks)
        and all(torch.cuda.can_device_access_peer(device, other) for other in devices if other != device.index)
    )
    host = f"{socket.gethostname()} {can_use}".encode()[-64:].rjust(64)
    hosts = group.exchange(host)  # also on a rank that cannot: the others wait for it
    return can_use and set(hosts) == {host}
