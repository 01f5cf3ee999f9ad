"""Which ranks hold a box of a tensor, in a time that does not grow with the number of ranks.

The shards of a dim that meet an interval are found by bisection, those of all dims give coordinates of the grid, and
these give ranks. In a `FlatLayout` the box is a box of each inner local tensor, too: it is halved until each part is in
consecutive shards. Only a `ListedLayout` is searched.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import product

from shardtensor.layout.box import Box, whole
from shardtensor.layout.layout import FlatLayout, Layout, ListedLayout, MeshLayout
from shardtensor.layout.pieces import Blocked, Interval, Pieces, packed, placed
from shardtensor.mesh import coordinate, index_along


def replica_count(layout: Layout) -> int:
    """Return the number of ranks that hold each element of a layout."""
    if isinstance(layout, ListedLayout) and not layout.shape:
        return len(layout.ranks)  # boxes of a scalar do not overlap, however many there are
    return math.prod(layout.grid[axis] for axis in _replica_axes(layout))


def holders(layout: Layout, box: Box, copy: int = 0) -> tuple[int, ...]:
    """Return the global ranks that hold an element of a box, each once.

    Args:
        layout: a layout that is not partial: along a partial axis ranks count as replicas.
        box: of the global tensor.
        copy: which of the `copies`, row-major over the axes along which ranks are replicas; ranks of the others are
            left out. Copy 0 is that of ``Layout.holds_first_copy``.
    """
    part = box.overlap(whole(layout.shape))
    if part is None:
        return ()
    if isinstance(layout, ListedLayout):
        found = tuple(dict.fromkeys(rank for rank, held in layout.owned if held.overlap(part) is not None))
        return found if layout.shape else found[copy : copy + 1]
    assert isinstance(layout, MeshLayout | FlatLayout)
    first = _place(layout, _replica_axes(layout), copy)
    return tuple(layout.ranks[first + place] for place in _places(layout, part))


def _replica_axes(layout: Layout) -> tuple[int, ...]:
    sharding = layout.sharding_axes
    return tuple(axis for axis in range(len(layout.grid)) if axis not in sharding)


def _place(layout: Layout, axes: Sequence[int], index: int) -> int:
    """Return the place in ``layout.ranks`` of a row-major index over some axes, at coordinate 0 along the others."""
    place = 0
    for axis in reversed(axes):
        index, i = divmod(index, layout.grid[axis])
        place += i * math.prod(layout.grid[axis + 1 :])
    return place


def _places(layout: MeshLayout | FlatLayout, part: Box) -> Iterator[int]:
    """Yield the places in ``layout.ranks``, at coordinate 0 along the replica axes, that hold an element of `part`."""
    dims = layout.dims if isinstance(layout, MeshLayout) else layout.inner.dims
    choices = [
        [(0, 0)] if cut is None else [(i, _place(layout, cut.axes, i)) for i in _shards(cut.pieces, low, high)]
        for cut, low, high in zip(dims, part.offsets, part.ends, strict=True)
    ]
    for choice in product(*choices):
        place = sum(step for _, step in choice)
        if isinstance(layout, MeshLayout):
            yield place
        else:
            for i in _flat_shards(layout, part, [i for i, _ in choice]):
                yield place + _place(layout, layout.axes, i)


def _shards(pieces: Pieces, low: int, high: int) -> list[int]:
    """Return the shards, in order, that hold an element of a range that is not empty."""
    if isinstance(pieces, Blocked):
        found, start = set(), 0
        for block in pieces.blocks:
            if max(low, start) < min(high, start + block.length):
                found.update(_shards(block, max(low - start, 0), min(high - start, block.length)))
            start += block.length
        return sorted(found)
    return [i for i in _span(pieces, low, high) if pieces.size(i)]


def _span(pieces: Pieces, low: int, high: int) -> range:
    """Return the shards, and empty ones between them, that hold an element of a range; pieces that are not blocked."""
    shards = range(pieces.count)
    first = bisect_right(shards, low, key=lambda i: pieces.interval(i)[1])
    return range(first, bisect_left(shards, high, lo=first, key=lambda i: pieces.interval(i)[0]))


def _flat_shards(layout: FlatLayout, part: Box, index: Sequence[int]) -> list[int]:
    """Return the shards of an inner local tensor that hold an element of `part`; `index` is its shard of each dim."""
    held = [
        ((0, size),) if cut is None else cut.pieces.intervals(i)
        for size, cut, i in zip(layout.shape, layout.inner.dims, index, strict=True)
    ]
    local = tuple(sum(stop - start for start, stop in intervals) for intervals in held)
    pieces = layout.pieces(local)
    found: set[int] = set()
    for spans in product(*map(placed, held, map(packed, held), part.offsets, part.ends)):
        found.update(_touched(pieces, spans, local))
    return sorted(found)


def _touched(pieces: Pieces, spans: Sequence[Interval], shape: Sequence[int]) -> list[int]:
    """Return the shards of a flattened tensor that hold an element of a box of it, perhaps one of them twice."""
    first = last = 0
    for (start, stop), size in zip(spans, shape, strict=True):
        first, last = first * size + start, last * size + stop - 1
    shards = _span(pieces, first, last + 1)
    if len(shards) <= 2 or last - first + 1 == math.prod(stop - start for start, stop in spans):
        return [i for i in shards if pieces.size(i)]
    dim = next(dim for dim, (start, stop) in enumerate(spans) if stop - start > 1)
    start, stop = spans[dim]
    middle = (start + stop) // 2
    halves = ((start, middle), (middle, stop))
    return [i for half in halves for i in _touched(pieces, (*spans[:dim], half, *spans[dim + 1 :]), shape)]


def replica_of(layout: Layout, rank: int) -> int:
    """Return which of the `copies` of its elements a global rank holds; -1 for a rank outside."""
    if isinstance(layout, ListedLayout):
        return (list(layout.ranks).index(rank) if not layout.shape else 0) if rank in layout.ranks else -1
    place = coordinate(layout.ranks, layout.grid, rank)
    if place is None:
        return -1
    return index_along(_replica_axes(layout), layout.grid, place)
