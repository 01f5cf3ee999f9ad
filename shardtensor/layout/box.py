"""Boxes: offsets and sizes of a part of a tensor, and their overlaps."""

from __future__ import annotations

import math
from typing import NamedTuple


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
