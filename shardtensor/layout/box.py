"""Boxes: offsets and sizes of a part of a tensor; their overlaps, and checks that they cover each element of it once.

`validate_non_overlapping_shards_metadata` and `check_tensor` are these checks with torch's names and arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from shardtensor.errors import LayoutError
from shardtensor.spec.devices import find_overlap


class Box(NamedTuple):
    """A box of a tensor, with exclusive ends; an empty one still has offsets."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(a, b) - o for a, b, o in zip(self.ends, other.ends, offsets, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def seen_from(self, other: Box) -> Box:
        """Return this box with offsets that count from those of another."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def runs(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """Return boxes, in memory order, that together are a range of the elements of a row-major tensor."""
    if stop <= start:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,))] if shape else [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row

    def part(index: int, a: int, b: int) -> list[Box]:
        return [Box((index, *box.offsets), (1, *box.sizes)) for box in runs(a, b, shape[1:])]

    if first > last:
        return part(last, start - last * row, stop - last * row)
    boxes = part(first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    return boxes + (part(last, 0, stop - last * row) if stop > last * row else [])


Owned = Sequence[tuple[int | None, Box]]


def find_hole(boxes: Sequence[Box], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the first element, row-major, that no box holds; None if the boxes cover `shape`."""
    if 0 in shape:
        return None
    live = [box for box in boxes if box.numel]
    if not shape:
        return None if live else ()
    bounds = sorted({0} | {edge for box in live for edge in (box.offsets[0], box.ends[0]) if edge < shape[0]})
    for start in bounds:
        slab = [Box(b.offsets[1:], b.sizes[1:]) for b in live if b.offsets[0] <= start < b.ends[0]]
        if not slab and len(shape) == 1:
            return (start,)
        hole = find_hole(slab, shape[1:])
        if hole is not None:
            return (start, *hole)
    return None


def check_tiling(owned: Owned, shape: tuple[int, ...]) -> None:
    """Raise LayoutError unless boxes, each with its global rank or None, cover each element of `shape` once."""
    for rank, box in owned:
        if len(box.offsets) != len(shape):
            raise LayoutError(
                f"Rank of tensor is {len(shape)}, but shards rank is {len(box.offsets)}",
                {"shape": _tuple(shape), "shard": _who(rank, box)},
                "give every shard one offset and one size for each dim",
                code="E202",
            )
        if any(end > size for end, size in zip(box.ends, shape, strict=True)):
            dim = next(i for i, (end, size) in enumerate(zip(box.ends, shape, strict=True)) if end > size)
            raise LayoutError(
                f"Shard offset {box.offsets[dim]} and length {box.sizes[dim]} exceeds tensor dim: {shape[dim]}",
                {"shape": _tuple(shape), "shard": _who(rank, box)},
                "give the true global size, or a shard that ends inside it",
                code="E209",
            )
    held = sum(box.numel for _, box in owned)
    if held == math.prod(shape) and find_overlap([box for _, box in owned]) is None:
        return  # `find_hole` takes the square of the number of boxes
    hole = find_hole([box for _, box in owned], shape)
    check_no_overlap(owned, {} if hole is None else {"and": f"no shard holds element {_tuple(hole)}"})
    if hole is not None:
        raise LayoutError(
            f"the shards do not cover the entire tensor: no shard holds element {_tuple(hole)}",
            {"shape": _tuple(shape), "volume": f"{held} of the shards does not match tensor volume {math.prod(shape)}"},
            f"add a shard that starts at {_tuple(hole)}, or give the true global size",
            code="E209",
        )


def check_no_overlap(owned: Owned, more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise LayoutError if two boxes share an element; `more` is added to the facts of the error."""
    pair = find_overlap([box for _, box in owned])
    if pair is not None:
        first, second = owned[pair[0]], owned[pair[1]]
        shared = first[1].overlap(second[1])
        raise LayoutError(
            f"Shards {_who(*first)} and {_who(*second)} overlap",
            {"both": f"hold {shared}", **more},
            "give each element to one shard",
            code="E209",
        )


def _owned(shards: Sequence[Any]) -> Owned:
    return [
        (shard.placement.rank() if shard.placement else None, Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)))
        for shard in shards
    ]


def validate_non_overlapping_shards_metadata(shards: Sequence[Any]) -> None:
    """Raise ValueError if two of the ``ShardMetadata`` overlap."""
    check_no_overlap(_owned(shards))


def check_tensor(shards_metadata: Sequence[Any], tensor_dims: Sequence[int]) -> None:
    """Raise ValueError if the ``ShardMetadata`` do not tile a tensor of size `tensor_dims`."""
    check_tiling(_owned(shards_metadata), tuple(tensor_dims))


def _who(rank: int | None, box: Box) -> str:
    return f"{box}" if rank is None else f"{box} of rank {rank}"


def _tuple(numbers: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, numbers)) + ")"


def get_split_size(dim_size: int, chunks: int) -> int:
    """Return the size of a full chunk: ceil(dim_size / chunks). Only the last chunks are smaller."""
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Return the size of chunk `idx`; 0 if the chunks before it hold all elements."""
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(sharding_dim_size: int, world_size: int, spec: Any, rank: int) -> tuple[int, int]:
    """Return the offset and size of `rank`'s chunk; ``(-1, -1)`` if no placement of the spec names the rank."""
    split_size = get_split_size(sharding_dim_size, world_size)
    for index, placement in enumerate(spec.placements):
        if placement.rank() == rank:
            length = get_chunked_dim_size(sharding_dim_size, split_size, index)
            return min(split_size * index, sharding_dim_size), length
    return -1, -1
