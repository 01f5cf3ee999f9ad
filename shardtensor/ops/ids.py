"""Ids into a dim (indices, targets, rows of a table): are they in range, and which of them does a rank hold."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.reducing import places
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled


def check_ids(
    ids: torch.Tensor, low: int, high: int, fault: Callable[[int], Exception], ignore: int | None = None
) -> None:
    """Raise ``fault(id)`` on every rank when an id other than `ignore` is not in ``[low, high)``, before data moves.

    Ids that every rank has are looked at where they are. Of ids that are dealt out the ranks tell each other the
    extremes, in one reduction of two numbers: a rank that raised alone would leave the others waiting. On CUDA nothing
    is waited for: as torch's kernels, it is an assert on the device.
    """
    ids = settled(ids) if isinstance(ids, ShardedTensor) else ids  # addends are no ids
    is_dealt = isinstance(ids, ShardedTensor) and not ids._layout.is_whole_on_all(ids._group.size)
    local = ids._local.detach() if isinstance(ids, ShardedTensor) else ids.detach()
    if local.is_meta or (not is_dealt and not local.numel()):
        return
    if ignore is not None:
        local = local[local != ignore] if local.is_cpu else local.masked_fill(local == ignore, low)
        if not is_dealt and not local.numel():
            return
    if not local.is_cpu:
        torch._assert_async(((local >= low) & (local < high)).all())
        return
    nothing = torch.iinfo(torch.int64)
    ends = [int(local.min()), int(local.max())] if local.numel() else [nothing.max, nothing.min + 1]
    if is_dealt:
        assert isinstance(ids, ShardedTensor)
        both = ids._group.all_reduce(torch.tensor([-ends[0], ends[1]], dtype=torch.int64), "max")
        ends = [-int(both[0]), int(both[1])]
    for end in ends if ends[0] <= ends[1] else []:
        if not low <= end < high:
            raise fault(end)


def held(ids: torch.Tensor, layout: CutLayout, rank: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where ids along `dim` lie in the local tensor of `rank`, 0 for those elsewhere; and which ones lie there."""
    count = layout.local_shape(rank)[dim]
    if layout.is_blocked(dim):
        where = torch.full((layout.shape[dim],), -1, device=ids.device)
        where[places(layout, rank, dim, ids.device)] = torch.arange(count, device=ids.device)
        here = where[ids]
    else:
        here = ids - layout.start(rank, dim)
    mine = (here >= 0) & (here < count)
    return here.masked_fill(~mine, 0), mine
