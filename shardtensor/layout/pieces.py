"""The shards of one dim: the intervals of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs

Interval = tuple[int, int]


def packed(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the place of each interval if they lie one after the other, as in a local tensor."""
    found, end = [], 0
    for start, stop in intervals:
        found.append((end, end + stop - start))
        end += stop - start
    return found


def placed(intervals: Sequence[Interval], places: Sequence[Interval], low: int, high: int) -> list[Interval]:
    """Return where the parts of intervals that are in a range lie, of intervals that lie at `places`.

    Example:
        >>> placed([(0, 4), (8, 12)], [(0, 4), (4, 8)], 2, 10)
        [(2, 4), (4, 6)]
    """
    return [
        (place + max(start, low) - start, place + min(stop, high) - start)
        for (start, stop), (place, _) in zip(intervals, places, strict=True)
        if max(start, low) < min(stop, high)
    ]


class Pieces:
    """A dim of `length` elements in `count` shards. A shard is one interval, except in `Blocked`."""

    @property
    def length(self) -> int:
        raise NotImplementedError

    @property
    def count(self) -> int:
        raise NotImplementedError

    def interval(self, i: int) -> Interval:
        raise NotImplementedError

    def intervals(self, i: int) -> tuple[Interval, ...]:
        """Return the intervals of shard `i`, with exclusive ends; an empty one starts at the end of the one before."""
        return (self.interval(i),)

    def size(self, i: int) -> int:
        """Return the number of elements of shard `i`."""
        start, stop = self.interval(i)
        return stop - start

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same size."""
        return all(self.size(i) == self.size(0) for i in range(self.count))


class _Decreasing(Pieces):
    """The first shard is the largest and the last one the smallest."""

    @property
    def is_even(self) -> bool:
        return self.size(0) == self.size(self.count - 1)


@attrs.frozen
class Stepped(_Decreasing):
    """Every shard has `step` elements, and the last ones fewer or none: even shards, torch.chunk, padded shards."""

    length: int
    count: int
    step: int

    def interval(self, i: int) -> Interval:
        start = i * self.step
        stop = start + self.step
        length = self.length
        return (min(start, length), min(stop, length))


@attrs.frozen
class Balanced(_Decreasing):
    """Shards differ by at most one unit, the larger first (numpy.array_split)."""

    length: int
    count: int
    unit: int

    def interval(self, i: int) -> Interval:
        each, extra = divmod(self.length // self.unit, self.count)
        start = i * each + min(i, extra)
        return (start * self.unit, (start + each + (i < extra)) * self.unit)


@attrs.frozen(cache_hash=True)
class Listed(Pieces):
    """Shards between given bounds: ``(0, 12, 24, 32)`` is 12, 12, 8."""

    bounds: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.bounds[-1]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def interval(self, i: int) -> Interval:
        return (self.bounds[i], self.bounds[i + 1])


@attrs.frozen(cache_hash=True)
class Blocked(Pieces):
    """Consecutive blocks (fused q, k, v), each cut separately: a shard has one interval of every block."""

    blocks: tuple[Pieces, ...]

    @property
    def length(self) -> int:
        return sum(block.length for block in self.blocks)

    @property
    def count(self) -> int:
        return self.blocks[0].count

    def intervals(self, i: int) -> tuple[Interval, ...]:
        start, found = 0, []
        for block in self.blocks:
            found += [(start + a, start + b) for a, b in block.intervals(i)]
            start += block.length
        return tuple(found)

    def size(self, i: int) -> int:
        return sum(block.size(i) for block in self.blocks)

    @property
    def is_even(self) -> bool:
        return all(block.is_even for block in self.blocks) or super().is_even


def chunked(length: int, count: int) -> Stepped:
    """Cut as torch.chunk does: shards of ceil(length / count) elements; the last ones may be smaller or empty."""
    return Stepped(length, count, -(-length // count))


def listed(sizes: tuple[int, ...]) -> Pieces:
    """Cut by sizes; the sizes of torch.chunk give the result of `chunked`, so that equal shards compare equal."""
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    same = chunked(bounds[-1], len(sizes))
    if all(same.interval(i) == pair for i, pair in enumerate(pairwise(bounds))):
        return same
    return Listed(tuple(bounds))


def balanced(length: int, count: int, unit: int) -> Pieces:
    """Cut into shards that differ by at most one unit; even shards give a `Stepped`."""
    return Stepped(length, count, length // count) if length % (count * unit) == 0 else Balanced(length, count, unit)


def padded(length: int, count: int, pad: int, unit: int) -> Stepped:
    """Cut as if the dim were padded to the next multiple of `pad`, and of `unit` times `count`."""
    grain = math.lcm(pad, count * unit)
    return Stepped(length, count, -(-length // grain) * grain // count)
