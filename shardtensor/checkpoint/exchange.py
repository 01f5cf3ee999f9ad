"""Bring whole tensors to one rank each, before they are written: one all-to-all for each few hundred megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from shardtensor.checkpoint.files import Written, is_whole
from shardtensor.checkpoint.items import Item
from shardtensor.checkpoint.reads import Place, box_places
from shardtensor.comm.group import Group
from shardtensor.layout.box import whole
from shardtensor.layout.holders import holders, replica_of
from shardtensor.layout.layout import Layout
from shardtensor.tensor.placing import own_device

ROUND_BYTES = 256 << 20
"""About how many bytes a rank receives in one all-to-all."""


def to_owners(planned: Sequence[Written], group: Group) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank writes whole and does not hold whole, on the CPU.

    All ranks of `group` call it, with tensors of the same names in one order.
    """
    made: dict[str, torch.Tensor] = {}
    sent = [each for each in planned if each.file and not is_whole(each.item.layout, group.ranks[each.owner])]
    for batch in _rounds(sent):
        sends: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
        receives: list[list[tuple[Item, int]]] = [[] for _ in range(group.size)]  # and how many bytes of it
        for each in batch:
            item = each.item
            if replica_of(item.layout, group.rank) == each.copy and item.local.numel():
                sends[each.owner].append(item.local.detach().contiguous().view(-1).view(torch.uint8))
            if each.owner == group.index:
                made[item.name] = torch.empty(item.shape, dtype=item.local.dtype)
                for rank in holders(item.layout, whole(item.shape), each.copy):
                    count = item.layout.numel(rank) * item.local.element_size()
                    receives[group.ranks.index(rank)].append((item, count))
        counts = [sum(part.numel() for part in parts) for parts in sends], [sum(n for _, n in got) for got in receives]
        parts = [torch.empty(0, dtype=torch.uint8), *chain(*sends)]
        flat = torch.cat([part.to(own_device(group.device_type)) for part in parts])
        received = group.all_to_all(flat, *counts).cpu()
        at = 0
        for rank, got in zip(group.ranks, receives, strict=True):
            for item, count in got:
                put(received[at : at + count], item.layout, rank, made[item.name])
                at += count
    return made


def _rounds(planned: Sequence[Written]) -> list[list[Written]]:
    """Return the tensors of each all-to-all, so that no owner gets much more than `ROUND_BYTES` in one."""
    rounds: dict[int, list[Written]] = {}
    loads: dict[int, int] = {}
    for each in planned:
        before = loads.get(each.owner, 0)
        rounds.setdefault(before // ROUND_BYTES, []).append(each)
        loads[each.owner] = before + each.item.whole_bytes
    return [rounds[i] for i in sorted(rounds)]


def put(received: torch.Tensor, layout: Layout, rank: int, whole_tensor: torch.Tensor) -> None:
    """Copy the bytes of the local tensor of `rank` to their places in the whole tensor."""
    local = received.clone().view(whole_tensor.dtype)  # a clone: the bytes may begin anywhere
    for box, place in zip(layout.boxes(rank), box_places(layout, rank), strict=True):
        whole_tensor[box.slices].copy_(region_view(local, place, box.sizes))


def region_view(local: torch.Tensor, place: Place, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the view of a region of a contiguous local tensor."""
    return local.as_strided(sizes, place.strides, local.storage_offset() + place.first)
