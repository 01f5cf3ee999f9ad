"""A layout: a spec bound to ranks and a shape. It computes which boxes a rank holds.

* `MeshLayout`: dims are sharded over the axes of a grid of ranks; the local tensor has the tensor's dims.
* `ListedLayout`: a list of boxes; the local tensor is the rank's one box. If some rank has several boxes, it is
  *packed*: one dim, with the rank's boxes, each row-major, one after the other.
* `FlatLayout`: each rank's local tensor under a `MeshLayout` is flattened and cut into ranges; packed.

Equal layouts have equal boxes on equal ranks; axis names are for messages and are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import product

import attrs

from shardtensor.layout.box import Box, runs, whole
from shardtensor.layout.pieces import Blocked, Pieces, listed, packed, padded, placed
from shardtensor.mesh import Ranks, coordinate, index_along

Shape = tuple[int, ...]


@attrs.frozen(cache_hash=True)
class DimCut:
    """The shards of a dim over axes of the grid (their numbers, major to minor)."""

    axes: tuple[int, ...]
    pieces: Pieces


@attrs.frozen(kw_only=True)
class Layout:
    """The base class of layouts, of a global `shape` on a `grid` of global `ranks`, row-major.

    The value is partial along the axes (by number) of `partial`, each with the operation that reduces it. `names` of
    axes are for messages.
    """

    shape: Shape
    ranks: Ranks
    grid: tuple[int, ...]
    partial: tuple[tuple[int, str], ...] = ()
    names: tuple[str, ...] = attrs.field(default=(), eq=False)

    @property
    def packed(self) -> bool:
        """Whether the local tensor is one dim that holds boxes one after the other."""
        return False

    @property
    def is_replicated(self) -> bool:
        """Whether every rank of the grid holds the full tensor, not partial."""
        return False

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that a global rank holds, in the order of its local tensor; () for a rank outside."""
        raise NotImplementedError

    def local_shape(self, rank: int) -> Shape:
        """Return the shape of the local tensor of a global rank."""
        raise NotImplementedError

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the place of each of `boxes` in the local tensor."""
        boxes = self.boxes(rank)
        if not self.packed:
            return tuple(whole(box.sizes) for box in boxes)
        found, start = [], 0
        for box in boxes:
            found.append(Box((start,), (box.numel,)))
            start += box.numel
        return tuple(found)

    @property
    def sharding_axes(self) -> tuple[int, ...]:
        """The sharding axes: ranks along them hold different elements. Along the others they are replicas."""
        return tuple(range(len(self.grid)))

    def numel(self, rank: int) -> int:
        """Return the number of elements that a global rank holds."""
        return math.prod(self.local_shape(rank))

    def is_whole_on_all(self, count: int) -> bool:
        """Whether each of the `count` ranks of a group holds the full tensor, as it would hold a plain tensor."""
        return self.is_replicated and len(self.ranks) == count

    def holds_first_copy(self, rank: int) -> bool:
        """Whether a rank is the first of the replicas of its elements."""
        place = coordinate(self.ranks, self.grid, rank)
        sharding = self.sharding_axes
        return place is not None and all(i == 0 for axis, i in enumerate(place) if axis not in sharding)

    def holds_full_value(self, rank: int) -> bool:
        """Whether a rank holds the value when a full value becomes a partial sum; the other ranks hold zeros."""
        place = coordinate(self.ranks, self.grid, rank)
        return place is None or all(place[axis] == 0 for axis, op in self.partial if op == "sum")

    def reduced(self) -> Layout:
        """Return this layout without partial axes."""
        return attrs.evolve(self, partial=()) if self.partial else self

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """The axes along which the value is partial."""
        return tuple(axis for axis, _ in self.partial)

    def axis_name(self, axis: int) -> str:
        """Return the name of an axis of the grid, for messages."""
        return self.names[axis] if self.names else f"axis{axis}"

    def _partial_text(self) -> str:
        return "".join(f" partial({self.axis_name(axis)}{f', op={op}' * (op != 'sum')})" for axis, op in self.partial)


@attrs.frozen(kw_only=True, cache_hash=True)
class MeshLayout(Layout):
    """Dims sharded over the axes of a grid; ``dims[d]`` is None if dim d is not sharded."""

    dims: tuple[DimCut | None, ...]

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)  # a DimCut is never false

    @property
    def cut_dims(self) -> tuple[int, ...]:
        return tuple(i for i, dim in enumerate(self.dims) if dim is not None)

    @property
    def cut_axes(self) -> tuple[int, ...]:
        return tuple(axis for dim in self.dims if dim is not None for axis in dim.axes)

    def is_blocked(self, dim: int) -> bool:
        """Whether a dim is cut in blocks, so that a rank holds several intervals of it."""
        cut = self.dims[dim]
        return cut is not None and isinstance(cut.pieces, Blocked)

    def start(self, rank: int, dim: int) -> int:
        """Return the first index of a rank's shard along a dim that is not blocked; 0 for a rank outside."""
        boxes = self.boxes(rank)
        return boxes[0].offsets[dim] if boxes else 0

    def piece(self, cut: DimCut, place: tuple[int, ...]) -> int:
        """Return the index of the shard of a dim at a coordinate of the grid."""
        index = 0
        for axis in cut.axes:  # not `index_along`: each reshard calls this
            index = index * self.grid[axis] + place[axis]
        return index

    def boxes(self, rank: int) -> tuple[Box, ...]:
        place = coordinate(self.ranks, self.grid, rank)
        if place is None:
            return ()
        return tuple(_box(choice) for choice in product(*self._intervals(place)))

    def _intervals(self, place: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
        """Return the intervals of each dim at a coordinate of the grid; several for a dim cut in blocks."""
        return [
            ((0, size),) if cut is None else cut.pieces.intervals(self.piece(cut, place))
            for size, cut in zip(self.shape, self.dims, strict=True)
        ]

    def local_shape(self, rank: int) -> Shape:
        place = coordinate(self.ranks, self.grid, rank)
        if place is None:
            return self.outside_shape
        return tuple(
            size if cut is None else cut.pieces.size(self.piece(cut, place))
            for size, cut in zip(self.shape, self.dims, strict=True)
        )

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        place = coordinate(self.ranks, self.grid, rank)
        if place is None:
            return ()
        return tuple(_box(choice) for choice in product(*map(packed, self._intervals(place))))

    def in_memory_order(self, rank: int, within: Box) -> list[Box]:
        """Return the boxes of the global tensor in a box of the rank's local tensor, in memory order."""
        place = coordinate(self.ranks, self.grid, rank)
        assert place is not None, "a rank outside holds nothing"
        parts = [
            placed(packed(held), held, low, high)
            for held, low, high in zip(self._intervals(place), within.offsets, within.ends, strict=True)
        ]
        last = max((dim for dim, span in enumerate(parts) if len(span) > 1), default=-1)
        choices = [
            [(i, i + 1) for start, stop in span for i in range(start, stop)]
            if dim < last  # dims before `last` index by index: for each index memory holds all of `last`
            else span
            for dim, span in enumerate(parts)
        ]
        return [_box(choice) for choice in product(*choices)]

    @property
    def sharding_axes(self) -> tuple[int, ...]:
        return tuple(sorted(self.cut_axes))

    @property
    def outside_shape(self) -> Shape:
        """The local shape of a rank outside the grid: 0 along the sharded dims, or along dim 0 if there are none."""
        cut = self.cut_dims or (0,)
        return tuple(0 if dim in cut else size for dim, size in enumerate(self.shape))

    def __str__(self) -> str:
        dims = ("-" if cut is None else "*".join(map(self.axis_name, cut.axes)) for cut in self.dims)
        return f"[{', '.join(dims)}]{self._partial_text()}"


@attrs.frozen(kw_only=True, cache_hash=True)
class ListedLayout(Layout):
    """A list of boxes, each with its rank."""

    owned: tuple[tuple[int, Box], ...]

    @property
    def packed(self) -> bool:
        return len(_boxes_by_rank(self)) != len(self.owned)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return _boxes_by_rank(self).get(rank, ())

    def holds_first_copy(self, rank: int) -> bool:
        # Boxes of a scalar do not overlap, so several ranks may list it.
        return rank in self.ranks if self.shape else rank == self.owned[0][0]

    def local_shape(self, rank: int) -> Shape:
        boxes = self.boxes(rank)
        if self.packed:
            return (sum(box.numel for box in boxes),)
        return boxes[0].sizes if boxes else (0,) * len(self.shape)

    def __str__(self) -> str:
        return f"{len(self.owned)} boxes on {len(self.ranks)} ranks{self._partial_text()}"


@attrs.frozen(kw_only=True, cache_hash=True)
class FlatLayout(Layout):
    """Each rank's local tensor under `inner`, over the same grid, flattened row-major and cut over `axes` into ranges.

    Ranges start at multiples of `unit` elements (0: a row of the inner local tensor), or have the `sizes` that the user
    chose.
    """

    inner: MeshLayout
    axes: tuple[int, ...]
    unit: int = 1
    sizes: tuple[int, ...] | None = None

    @property
    def packed(self) -> bool:
        return True

    @property
    def sharding_axes(self) -> tuple[int, ...]:
        return tuple(sorted({*self.inner.cut_axes, *self.axes}))

    def pieces(self, local: Shape) -> Pieces:
        """Return the ranges of a flattened inner local tensor of this shape."""
        if self.sizes is not None:
            return listed(self.sizes)
        unit = self.unit or max(math.prod(local[1:]), 1)
        return padded(math.prod(local), math.prod(self.grid[axis] for axis in self.axes), 1, unit)

    def span(self, rank: int) -> tuple[int, int]:
        """Return the range of the flattened inner local tensor that a rank holds."""
        place = coordinate(self.ranks, self.grid, rank)
        if place is None:
            return (0, 0)
        return self.pieces(self.inner.local_shape(rank)).interval(index_along(self.axes, self.grid, place))

    def boxes(self, rank: int) -> tuple[Box, ...]:
        start, stop = self.span(rank)
        if start == stop:
            return ()
        ranges = runs(start, stop, self.inner.local_shape(rank))
        return tuple(box for part in ranges for box in self.inner.in_memory_order(rank, part))

    def local_shape(self, rank: int) -> Shape:
        start, stop = self.span(rank)
        return (stop - start,)

    def __str__(self) -> str:
        return f"{self.inner} flat({'*'.join(map(self.axis_name, self.axes))}){self._partial_text()}"


@lru_cache(maxsize=4096)
def has_equal_parts(layout: Layout) -> bool:
    """Whether all ranks of a layout hold the same number of elements."""
    if isinstance(layout, MeshLayout) and all(cut is None or cut.pieces.is_even for cut in layout.dims):
        return True
    first = layout.numel(layout.ranks[0])
    return all(layout.numel(rank) == first for rank in layout.ranks)


@lru_cache(maxsize=1024)
def _boxes_by_rank(layout: ListedLayout) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of each rank, so that `boxes` does not search the list."""
    held: dict[int, list[Box]] = {}
    for rank, box in layout.owned:
        held.setdefault(rank, []).append(box)
    return {rank: tuple(boxes) for rank, boxes in held.items()}


def _box(intervals: Iterable[tuple[int, int]]) -> Box:
    intervals = tuple(intervals)
    return Box(tuple(start for start, _ in intervals), tuple(stop - start for start, stop in intervals))


@lru_cache(maxsize=4096)
def replicated(shape: Shape, ranks: Ranks, grid: tuple[int, ...] | None = None) -> MeshLayout:
    """Return the layout of a full tensor on each of `ranks`."""
    return MeshLayout(shape=shape, ranks=ranks, grid=grid or (len(ranks),), dims=(None,) * len(shape))


def same_boxes(a: Layout, b: Layout) -> bool:
    """Whether two layouts have the same boxes, in the same order, on the same ranks, and the same partial axes."""
    if a is b or a == b:
        return True
    if a.shape != b.shape or a.packed != b.packed or bool(a.partial) != bool(b.partial):
        return False
    if a.partial and (a.ranks != b.ranks or a.grid != b.grid or a.partial != b.partial):
        return False
    return all(a.boxes(rank) == b.boxes(rank) for rank in {*a.ranks, *b.ranks})
