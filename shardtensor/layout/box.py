"""Boxes: the offsets and sizes of a piece of a tensor, and their algebra."""

from __future__ import annotations

import math
from typing import NamedTuple


class Box(NamedTuple):
    """A half-open box of a tensor; an empty one still has a place.

    Example:
        >>> box = Box((2, 0), (3, 4))
        >>> box.slices, box.numel, str(box)
        ((slice(2, 5, None), slice(0, 4, None)), 12, '[2:5, 0:4]')
    """

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
        """The box that both hold, or None when they share no element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(min(a, b) - o for a, b, o in zip(self.ends, other.ends, offsets, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))
