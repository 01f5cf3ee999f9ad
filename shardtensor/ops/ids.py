"""Ids into a dim (indices, targets, rows of a table): are they in range, and which of them does a rank hold."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.layout import CutLayout
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
    local = ids._local if isinstance(ids, ShardedTensor) else ids
    strays = strays_of(local, low, high, ignore)
    if isinstance(ids, ShardedTensor) and local.is_cpu and not ids._layout.is_whole_on_all(ids._group.size):
        strays = widest(strays, ids._group)
    if strays:
        raise fault(strays[0])


def strays_of(local: torch.Tensor, low: int, high: int, ignore: int | None = None, *, waits: bool = False) -> list[int]:
    """The least and the largest of this rank's ids that are out of range.

    On CUDA none: an assert on the device, unless it `waits` for the card to tell.
    """
    local = local.detach()
    if local.is_meta or not local.numel():
        return []
    if not local.is_cpu and not waits:
        is_id = (local >= low) & (local < high)
        torch._assert_async((is_id if ignore is None else is_id | (local == ignore)).all())
        return []
    least, most = map(int, local.aminmax())
    if ignore is not None and not low <= least <= most < high:
        local = local[local != ignore]
        least, most = map(int, local.aminmax()) if local.numel() else (low, low)
    return [end for end in (least, most) if not low <= end < high]


def widest(strays: list[int], group: Group) -> list[int]:
    """The least and the largest of all ranks' strays (collective)."""
    nothing = torch.iinfo(torch.int64)
    ends = [-strays[0], strays[-1]] if strays else [nothing.min, nothing.min]
    ends = group.all_reduce(torch.tensor(ends, dtype=torch.int64), "max").tolist()
    return [] if ends[1] == nothing.min else [-ends[0], ends[1]]


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


def places(layout: CutLayout, rank: int, dim: int, device: torch.device) -> torch.Tensor:
    """The global indices along `dim` of the elements that `rank` holds, in local order."""
    boxes = layout.boxes(rank)
    if not boxes:
        return torch.arange(0, device=device)
    spans = dict.fromkeys((box.offsets[dim], box.sizes[dim]) for box in boxes)
    pieces = [torch.arange(start, start + size, device=device) for start, size in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
