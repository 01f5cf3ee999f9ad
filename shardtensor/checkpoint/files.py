"""Who writes which tensor into which file, for one save; and whole tensors on their way to the ranks that write them:
one all-to-all for each few hundred megabytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain

import attrs
import torch

from shardtensor.checkpoint.contents import Contents
from shardtensor.checkpoint.items import Item, parts_of
from shardtensor.checkpoint.manifest import INDEX, TensorRecord, describe, folder_of, rank_file
from shardtensor.checkpoint.writing import FilePart, NewFile, own_metadata
from shardtensor.comm.group import Group
from shardtensor.layout.box import whole
from shardtensor.layout.holders import holders, replica_count, replica_of
from shardtensor.layout.layout import Layout
from shardtensor.layout.partition import assign_owners
from shardtensor.mesh import Ranks
from shardtensor.tensor.placing import own_device


@attrs.frozen(eq=False)
class Written:
    """How a tensor is written: replica `copy` of each element is, as the ranks hold it; or, if there is a `file`, all
    of it by one rank, at place `owner` in the group, under the name `key`."""

    item: Item
    copy: int
    owner: int = 0
    file: str = ""
    key: str = ""


def plan_files(made: Contents, layout: str, ranks: Ranks) -> list[Written]:
    """Determine how each tensor is written, so that all ranks write about as much; the same on every rank."""
    items = list(made.items.values())
    written: list[Written] = []
    by_copies: dict[int, list[Item]] = {}
    by_section: dict[str, list[Item]] = {}
    for item in items:
        if item.is_of_first:
            written.append(Written(item, 0))
        else:
            by_copies.setdefault(replica_count(item.layout), []).append(item)
        section = item.name.partition("/")[0]
        if layout == "whole" and section.partition(".")[0] == "model":
            by_section.setdefault(section, []).append(item)
    for count, each in by_copies.items():
        chosen = assign_owners([item.whole_bytes for item in each], [0] * count)
        written += [Written(item, copy) for item, copy in zip(each, chosen, strict=True)]
    by_name = {each.item.name: each for each in written}
    loads = [0] * len(ranks)
    for section, each in by_section.items():
        free = [item for item in each if not item.is_of_first]
        owner_of = dict(zip(free, assign_owners([item.whole_bytes for item in free], loads), strict=True))
        owners = [owner_of.get(item, 0) for item in each]
        writers = sorted(set(owners))
        folder = folder_of(section)
        for item, owner in zip(each, owners, strict=True):
            number = f"-{writers.index(owner) + 1:05d}-of-{len(writers):05d}" if len(writers) > 1 else ""
            file, key = f"{folder}model{number}.safetensors", item.name.partition("/")[2]
            by_name[item.name] = attrs.evolve(by_name[item.name], owner=owner, file=file, key=key)
    return [by_name[item.name] for item in items]


def index_texts(planned: Sequence[Written]) -> dict[str, str]:
    """Return the text of the index of each model that is in several files, by its name; transformers looks for it."""
    by_folder: dict[str, list[Written]] = {}
    for each in planned:
        if each.file:
            by_folder.setdefault(each.file.rpartition("model")[0], []).append(each)
    return {
        f"{folder}{INDEX}": index_text(
            {each.key: each.file.removeprefix(folder) for each in inner}, sum(each.item.whole_bytes for each in inner)
        )
        for folder, inner in by_folder.items()
        if len({each.file for each in inner}) > 1
    }


def index_text(files: Mapping[str, str], size_bytes: int) -> str:
    """Return the text of an index: the file of each tensor, and the bytes of all."""
    return json.dumps({"metadata": {"total_size": size_bytes}, "weight_map": dict(files)}, indent=2)


def is_whole(layout: Layout, rank: int) -> bool:
    """Whether a rank holds all elements of a tensor, in their order."""
    return layout.boxes(rank) == (whole(layout.shape),)


def writes_its_part(each: Written, group: Group) -> bool:
    """Whether this rank writes its local tensor as it is: its part, or all of a tensor that it holds whole."""
    if each.file:
        return each.owner == group.index and is_whole(each.item.layout, group.rank)
    return replica_of(each.item.layout, group.rank) == each.copy


def files_and_records(
    made: Contents,
    planned: Sequence[Written],
    whole_tensors: Mapping[str, torch.Tensor],
    copied: Mapping[str, Item],
    group: Group,
) -> tuple[list[NewFile], dict[str, TensorRecord]]:
    """Return the files that this rank writes, and where every tensor is. `copied` are items over copies in host memory,
    by name, which are written in place of the others."""
    model_files: dict[str, list[FilePart]] = {}
    parts: list[FilePart] = []
    records: dict[str, TensorRecord] = {}
    for each in planned:
        item = copied.get(each.item.name, each.item)
        if each.file:
            records[item.name] = TensorRecord(item.shape, item.dtype, file=each.file)
            if each.owner == group.index:
                values = item.local if is_whole(item.layout, group.rank) else whole_tensors[item.name]
                part = FilePart(each.key, item.dtype, item.shape, values.contiguous())
                model_files.setdefault(each.file, []).append(part)
            continue
        layout, texts = describe(item.layout)
        is_same = layout is item.layout
        records[item.name] = TensorRecord(item.shape, item.dtype, **texts, copy=each.copy if is_same else 0)
        if replica_of(layout, group.rank) == records[item.name].copy:
            values = item.local if is_same else _laid_out(item, layout, group.rank)
            if values.numel():
                parts.append(FilePart(item.name, item.dtype, tuple(values.shape), values.contiguous()))
    for item in (copied.get(name, own) for name, own in made.own_items.items()):
        parts.append(FilePart(item.name, item.dtype, item.shape, item.local.contiguous()))
    own = NewFile(rank_file(group.rank, max(group.ranks) + 1), parts, own_metadata(made.own_values))
    return [own, *(NewFile(name, each) for name, each in model_files.items())], records


def _laid_out(item: Item, layout: Layout, rank: int) -> torch.Tensor:
    """Return the local tensor under a layout that lists the boxes of the item's layout, flat."""
    parts = dict(parts_of(item.local, item.layout, rank))
    return torch.cat([item.local.new_empty(0), *(parts[box].flatten() for box in layout.boxes(rank))])


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
    local = received.clone().view(whole_tensor.dtype).view(layout.local_shape(rank))  # the bytes may begin anywhere
    for box, part in parts_of(local, layout, rank):
        whole_tensor[box.slices].copy_(part)
