"""`_broadcast_object`, the helper of torch's ``zero_redundancy_optimizer`` that code for it imports."""

from __future__ import annotations

import io
from typing import Any

import torch

from shardtensor.comm.process_group import as_group


def broadcast_object(obj: Any, src_rank: int, group: Any = None, device: torch.device | str = "cpu") -> Any:
    """Return the object of the global rank `src_rank`, on all ranks of the group; its tensors are on `device`.

    It is pickled, so all ranks must trust the source.
    """
    members = as_group(group)
    source = members.ranks.index(src_rank)
    data = torch.empty(0, dtype=torch.uint8)
    if members.index == source:
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    size = members.broadcast(torch.tensor([data.numel()], device=device), source)
    data = data.to(device) if members.index == source else torch.empty(int(size), dtype=torch.uint8, device=device)
    sent = members.broadcast(data, source)
    if members.index == source:
        return obj
    return torch.load(io.BytesIO(sent.cpu().numpy().tobytes()), map_location=device, weights_only=False)
