"""Gather a sharded tensor to one rank."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.comm.agree import agree
from shardtensor.errors import LayoutError
from shardtensor.layout.box import whole
from shardtensor.layout.layout import ListedLayout
from shardtensor.tensor.move import moved, settle
from shardtensor.tensor.sharded_tensor import ShardedTensor


def gather_or_pick(
    tensor: ShardedTensor,
    dst: int = 0,
    out: torch.Tensor | None = None,
    enforce_dtype: bool = False,
    dtype: torch.dtype | None = None,
    **call: Any,
) -> Any:
    """Write the whole tensor into `out` on the group rank `dst`. No gradient. All ranks of the group call it.

    ``x.gather(dim, index)`` is `torch.gather`, told by an index of another dtype than the tensor's; of an integer
    tensor call `torch.gather` itself.

    Args:
        dst: group rank that receives.
        out: on `dst` a tensor of the global shape; None elsewhere.
        enforce_dtype: convert to ``out.dtype`` instead of demanding it.
        dtype: send the elements as this dtype.
    """
    if call or is_index(tensor, dst, out, enforce_dtype):
        given = {"dim": dst, "index": out, **call}
        return torch.gather(tensor, **given)
    gather_to(tensor, dst, out, enforce_dtype, dtype)
    return None


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
    if layout.partial:  # joined before they are rounded to another dtype
        local, layout = settle(local, layout, group), layout.reduced()
    if dtype is not None:
        local = local.to(dtype)
    rank, shape = group.ranks[dst], layout.shape
    there = ListedLayout(shape=shape, ranks=(rank,), grid=(1,), owned=((rank, whole(shape)),))
    local = moved(local, layout, there, group)
    if out is not None:
        out.copy_(local)


def is_index(tensor: ShardedTensor, dim: int, given: torch.Tensor | None, enforce_dtype: bool) -> bool:
    """Whether ``tensor.gather(dim, given)`` means `torch.gather`: `given` is of integers and `tensor` is not.

    Then one small exchange makes sure that all ranks mean it, as an `out` is given on one rank only.
    """
    if given is None or enforce_dtype or given.dtype == tensor.dtype or given.dtype not in (torch.int64, torch.int32):
        return False
    agree(tensor._group, "gather", {"dim": str(dim), "index": str(tuple(given.shape))})
    return True


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
            fix=["pass a tensor of the global shape", "call torch.gather(tensor, dim, index) to pick elements"],
        )
    if dtype is not None and out.dtype != dtype:
        return LayoutError(f"out is {out.dtype}, what comes is {dtype}", fix="pass enforce_dtype=True to convert")
    return None


ShardedTensor.gather = gather_or_pick
