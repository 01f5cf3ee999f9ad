"""Gather a sharded tensor to one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardtensor.comm.agree import agree
from shardtensor.errors import LayoutError
from shardtensor.layout.assembly import assembly
from shardtensor.tensor.move import assemble, settle

if TYPE_CHECKING:
    from shardtensor.tensor.sharded_tensor import ShardedTensor


@torch.no_grad()
def gather_to(
    tensor: ShardedTensor, dst: int, out: torch.Tensor | None, enforce_dtype: bool, dtype: torch.dtype | None
) -> None:
    """Write the whole of `tensor` into `out` on group rank `dst`. All ranks of the group call it.

    One small exchange comes first, so that a missing or misshapen `out` is the same error on every rank.
    """
    group = tensor._group
    if group.index < 0:
        return
    fault = _fault(tensor, dst, out, None if enforce_dtype else dtype or tensor.dtype)
    agree(group, "gather", {"dst": str(dst), "dtype": str(dtype)}, fault)
    local, layout = tensor._local, tensor._layout
    if layout.partial:
        local, layout = settle(local, layout, group), layout.reduced()
    if dtype is not None:
        local = local.to(dtype)
    plan = assembly(layout, group.ranks)
    flat = group.gather(local.reshape(-1)[: plan.counts[group.index]], plan.counts, dst)
    if flat is not None:
        assert out is not None
        out.copy_(assemble(flat, layout, group))


def _fault(tensor: ShardedTensor, dst: int, out: torch.Tensor | None, dtype: torch.dtype | None) -> LayoutError | None:
    """What is wrong with this rank's call; `dtype` is what `out` must have, None for any."""
    group = tensor._group
    if not 0 <= dst < group.size:
        return LayoutError(f"dst={dst} is not a rank of this group", {"group ranks": f"0 to {group.size - 1}"})
    if group.index != dst:
        if out is None:
            return None
        return LayoutError(
            "Argument ``dst_tensor`` must NOT be specified on non-destination ranks.",
            fix=f"pass out=None on every rank but {dst}",
        )
    if out is None:
        return LayoutError(
            f"Argument ``dst_tensor`` must be specified on destination rank {dst}",
            fix=f"pass out=torch.empty({tuple(tensor.shape)}) there",
        )
    if tuple(out.shape) != tuple(tensor.shape):
        return LayoutError(
            f"Argument ``dst_tensor`` have size {tuple(out.shape)},but should be {tuple(tensor.shape)}",
            fix="pass a tensor of the global shape",
        )
    if dtype is not None and out.dtype != dtype:
        return LayoutError(f"out is {out.dtype}, what comes is {dtype}", fix="pass enforce_dtype=True to convert")
    return None
