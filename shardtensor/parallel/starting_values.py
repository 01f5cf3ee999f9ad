"""Equal values to start from: the copies of a tensor along the data axes taken from the first of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardtensor.comm.group import Group
from shardtensor.parallel.data_axes import DataAxes
from shardtensor.tensor.sharded_tensor import local_of


@torch.no_grad()
def take_first_copies(named: Iterable[tuple[str, torch.Tensor]], axes: DataAxes) -> None:
    """Overwrite tensors with what the first data rank that holds a copy has; one message a group, dtype and device.

    All ranks of the mesh call it, with the same tensors. What is on the meta device has no values yet.
    """
    kinds: dict[Any, tuple[Group, dict[int, torch.Tensor]]] = {}
    for name, tensor in named:
        local = local_of(tensor)
        group, _ = axes.copies(name, tensor)
        if group.size > 1 and not local.is_meta:
            kinds.setdefault((id(group), local.dtype, local.device), (group, {}))[1].setdefault(id(local), local)
    for group, found in kinds.values():
        locals_ = [local.detach() for local in found.values()]
        sizes = [local.numel() for local in locals_]
        if not sum(sizes):
            continue
        flat = group.broadcast(torch.cat([local.reshape(-1) for local in locals_]))
        if group.index != 0:
            for local, values in zip(locals_, flat.split(sizes), strict=True):
                local.copy_(values.view(local.shape))
