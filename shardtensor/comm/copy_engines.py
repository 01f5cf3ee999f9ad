"""Gathers that take no multiprocessor: NCCL lets the copy engines of the GPUs do them, into memory registered for it.

A product that runs beside an ordinary all-gather loses the multiprocessors that NCCL takes, about as much time as the
gather lasts. NCCL 2.28 gathers with copy engines where the communicator was made for it (``cta_policy``), the memory is
registered with it on all ranks, and the ranks are GPUs of one host that see each other. Nothing else may use such
memory in a collective of another communicator.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from shardtensor.comm import primitives
from shardtensor.comm.group import Group
from shardtensor.comm.torch_group import TorchGroup

_NO_MULTIPROCESSORS = 2  # NCCL_CTA_POLICY_ZERO
_SWITCH = "SHARDTENSOR_COPY_ENGINES"


def gathering(group: Group, size_bytes: int, device: torch.device) -> tuple[Group, torch.Tensor]:
    """Return memory to gather into, as bytes, and the group to gather by. All members call it with equal sizes.

    Both are what they would be without this module where copy engines cannot be used, or where the environment says
    ``SHARDTENSOR_COPY_ENGINES=0``.

    References:
        NCCL 2.28 release notes, "copy engine based collectives".
    """
    inner = getattr(group, "_group", group)  # of a group whose collectives are checked
    if device.type != "cuda" or not isinstance(inner, TorchGroup) or not _all_can(inner, device):
        return group, torch.empty(size_bytes, dtype=torch.uint8, device=device)
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = _NO_MULTIPROCESSORS  # type: ignore[attr-defined]
    ranks = tuple(inner.ranks)
    process_group = primitives.new_group(ranks, primitives.timeout_of(inner.process_group), options)
    primitives.all_reduce(process_group, torch.zeros(1, device=device), "sum")  # NCCL connects in its first call
    backend: Any = process_group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    backend.register_mem_pool(pool, symm=True)
    made = TorchGroup(process_group)
    made.pool = pool  # type: ignore[attr-defined]  # as long as the group: the memory is registered with it
    return made, memory


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
