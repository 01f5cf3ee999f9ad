"""Who holds what of a tensor, in few enough parts to be drawn: one for each place along the axes that cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product

import attrs

from shardtensor.layout.box import Box, runs
from shardtensor.layout.layout import CutLayout, DimCut, FlatLayout, Layout, ListedLayout
from shardtensor.layout.pieces import Interval
from shardtensor.mesh import coordinate

Stretch = tuple[int, int]
"""Neighbouring pieces of one cut, half-open: ``(0, 1)`` is the first alone."""


@attrs.frozen(eq=False)
class Part:
    """What the ranks at one place along the axes that cut hold; all of them hold copies of it.

    Attributes:
        stretches: for each of the picture's cuts, the pieces it stands for; several where neighbours are drawn as one.
        rank: the first rank of the first place.
        boxes: of the tensor; those of neighbours joined.
        least, most: elements that a rank at one of its places holds.
    """

    stretches: tuple[Stretch, ...]
    rank: int
    boxes: tuple[Box, ...]
    least: int
    most: int

    @property
    def places(self) -> int:
        """How many neighbours it stands for."""
        return math.prod(stop - start for start, stop in self.stretches)


@attrs.frozen(eq=False)
class Picture:
    """A layout in parts.

    Attributes:
        cuts: the axes of each cut, by their numbers in the grid, major first.
        names: of the axes, by number.
        parts: in order; together they cover each element of the tensor once.
        made_of: by the name of an axis that is made of others, the names of those; where a cut goes along all of them,
            coordinates are those along the one.
    """

    layout: Layout
    cuts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    parts: tuple[Part, ...]
    made_of: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)

    @property
    def axes(self) -> tuple[int, ...]:
        """Along which ranks hold different elements; those of one rank do not count."""
        return tuple(axis for cut in self.cuts for axis in cut if self.layout.grid[axis] > 1)

    @property
    def copies(self) -> int:
        """How many ranks hold each element."""
        return len(self.layout.ranks) // math.prod(self.layout.grid[axis] for axis in self.axes)

    @property
    def merged(self) -> int:
        """How many places, at most, are drawn as one part."""
        return max(part.places for part in self.parts)

    @property
    def is_by_rank(self) -> bool:
        """Whether every part is one rank's."""
        return self.copies == 1 and self.merged == 1

    def key(self, index: int) -> int:
        """The number that gives a part its colour: the rank, where it is one rank's."""
        return self.parts[index].rank if self.is_by_rank else index

    def label(self, part: Part) -> str:
        """The few characters that stand in a part: the rank, where it is one, or the coordinates."""
        if self.is_by_rank:
            return str(part.rank)
        return " ".join(filter(None, (_coordinates(self, i, part, "") for i in range(len(self.cuts)))))

    def place_text(self, part: Part) -> str:
        """Where the ranks of a part stand: ``tp 1``, or ``tp 1, dp 0 to 31``."""
        return ", ".join(filter(None, (_coordinates(self, i, part, "name") for i in range(len(self.cuts)))))

    def ranks(self, part: Part, limit: int = 8) -> tuple[tuple[int, ...], int]:
        """The first ranks that hold a part, and how many there are."""
        return tuple(islice(self._ranks(part), limit)), part.places * self.copies

    def named_axes(self, axes: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """The names of some axes: of each, or of the one that several make; axes of size 1 are left out."""
        found: list[tuple[str, tuple[int, ...]]] = []
        rest = tuple(axes)
        while rest:
            names = [self.names[axis] for axis in rest]
            whole = next((n for n, parts in self.made_of.items() if names[: len(parts)] == list(parts)), None)
            count = 1 if whole is None else len(self.made_of[whole])
            found.append((whole or names[0], rest[:count]))
            rest = rest[count:]
        return [(name, group) for name, group in found if math.prod(self.layout.grid[axis] for axis in group) > 1]

    def _ranks(self, part: Part) -> Iterator[int]:
        layout = self.layout
        others = [axis for axis in range(len(layout.grid)) if axis not in self.axes]
        for pieces in product(*(range(*stretch) for stretch in part.stretches)):
            here = _place(layout, self.cuts, pieces)
            for rest in product(*(range(layout.grid[axis]) for axis in others)):
                yield _rank(layout, here | dict(zip(others, rest, strict=True)))

    def part_of(self, rank: int) -> int | None:
        """The number of the part that a rank holds; None for one that holds nothing."""
        place = coordinate(self.layout.ranks, self.layout.grid, rank)
        if place is None:
            return None
        pieces = [_index(self.layout, cut, place) for cut in self.cuts]
        for i, part in enumerate(self.parts):
            if all(start <= piece < stop for piece, (start, stop) in zip(pieces, part.stretches, strict=True)):
                return i
        return None


def picture_of(
    layout: Layout, limit: int = 64, names: Sequence[str] = (), made_of: Mapping[str, tuple[str, ...]] | None = None
) -> Picture:
    """The parts of a layout, about `limit` at most; where there are more places, neighbours are drawn as one.

    Args:
        names: of the mesh's axes, for a layout that does not know them.
        made_of: the names of axes that are made of others, with theirs.

    Example:
        >>> from shardtensor.layout.bind import bind
        >>> from shardtensor.mesh import read_mesh
        >>> from shardtensor.spec.parse import parse_spec
        >>> picture = picture_of(bind(parse_spec("[tp, -]"), (8, 6), read_mesh("dp=2, tp=4")))
        >>> part = picture.parts[1]
        >>> picture.place_text(part), picture.ranks(part), str(part.boxes[0])
        ('tp 1', ((1, 5), 2), '[2:4, 0:6]')
    """
    grid = layout.grid
    known = layout.names or (tuple(names) if len(names) == len(grid) else ())
    called = known or tuple(f"place{i}" if len(grid) > 1 else "place" for i in range(len(grid)))
    if isinstance(layout, ListedLayout):
        sizes = [layout.numel(rank) for rank in layout.ranks]
        each = zip(layout.ranks, sizes, strict=True)
        parts = tuple(Part(((i, i + 1),), rank, layout.boxes(rank), n, n) for i, (rank, n) in enumerate(each))
        return Picture(layout, ((0,),), called, parts)
    assert isinstance(layout, CutLayout | FlatLayout)
    inner = layout.inner if isinstance(layout, FlatLayout) else layout
    cuts = [cut for cut in inner.dims if cut is not None]
    axes = [cut.axes for cut in cuts]
    if isinstance(layout, FlatLayout):
        return Picture(layout, (*axes, layout.axes), called, tuple(_flat_parts(layout, cuts, limit)), made_of or {})
    return Picture(layout, tuple(axes), called, tuple(_cut_parts(layout, cuts, limit)), made_of or {})


def _cut_parts(layout: CutLayout, cuts: Sequence[DimCut], limit: int) -> Iterator[Part]:
    whole = math.prod(size for cut, size in zip(layout.dims, layout.shape, strict=True) if cut is None)
    for stretches in product(*_stretches([cut.pieces.count for cut in cuts], limit)):
        held = iter(map(_joined, cuts, stretches))
        sides = [
            ((0, size),) if cut is None else next(held) for cut, size in zip(layout.dims, layout.shape, strict=True)
        ]
        boxes = tuple(_box(choice) for choice in product(*sides))
        sizes = [[cut.pieces.size(i) for i in range(*stretch)] for cut, stretch in zip(cuts, stretches, strict=True)]
        least, most = (whole * math.prod(map(choose, sizes)) for choose in (min, max))
        rank = _rank(layout, _place(layout, [cut.axes for cut in cuts], [start for start, _ in stretches]))
        yield Part(stretches, rank, boxes, least, most)


def _flat_parts(layout: FlatLayout, cuts: Sequence[DimCut], limit: int) -> Iterator[Part]:
    inner = list(product(*_stretches([cut.pieces.count for cut in cuts], limit)))
    apart = all(stop - start == 1 for stretches in inner for start, stop in stretches)
    count = math.prod(layout.grid[axis] for axis in layout.axes)
    axes = [cut.axes for cut in cuts]
    for stretches in inner:
        for span in _stretches([count], limit // len(inner) if apart else 1)[0]:
            boxes: list[Box] = []
            sizes = set()
            for pieces in product(*(range(*stretch) for stretch in stretches)):
                here = _place(layout, axes, pieces)
                ranks = [_rank(layout, here | _digits(layout, layout.axes, i)) for i in (span[0], span[1] - 1)]
                begin, end = layout.span(ranks[0])[0], layout.span(ranks[1])[1]
                for run in runs(begin, end, layout.inner.local_shape(ranks[0])):
                    boxes += layout.inner.in_memory_order(ranks[0], run)
                sizes |= {layout.numel(rank) for rank in ranks}
            here = _place(layout, [*axes, layout.axes], [start for start, _ in (*stretches, span)])
            yield Part((*stretches, span), _rank(layout, here), tuple(boxes), min(sizes), max(sizes))


def _stretches(counts: Sequence[int], limit: int) -> list[list[Stretch]]:
    """The pieces of each cut in stretches of neighbours, so that all cuts together have about `limit`."""
    each = max(1, round(limit ** (1 / max(len(counts), 1)))) if math.prod(counts) > limit else max(counts, default=1)
    found = []
    for count in counts:
        step = -(-count // each)
        found.append([(start, min(start + step, count)) for start in range(0, count, step)])
    return found


def _joined(cut: DimCut, stretch: Stretch) -> tuple[Interval, ...]:
    """The intervals of neighbouring pieces, those that touch in one; empty ones only where there is nothing else."""
    if stretch[1] - stretch[0] == 1:
        return cut.pieces.intervals(stretch[0])
    found: list[Interval] = []
    for start, stop in sorted(pair for i in range(*stretch) for pair in cut.pieces.intervals(i)):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop or not found:
            found.append((start, stop))
    return tuple(found)


def _coordinates(picture: Picture, cut: int, part: Part, named: str) -> str:
    """The coordinates along the axes of one cut; of a stretch, those of its ends from where they differ."""
    layout, axes = picture.layout, picture.cuts[cut]
    start, stop = part.stretches[cut]
    ends = [_digits(layout, axes, i) for i in (start, stop - 1)]
    told = picture.named_axes(axes)
    first, last = ([_index(layout, group, at) for _, group in told] for at in ends)
    same = next((n for n in range(len(told)) if first[n] != last[n]), len(told))

    def text(n: int, at: Sequence[int]) -> str:
        return f"{told[n][0]} {at[n]}" if named else str(at[n])

    joint, to = (", ", " to ") if named else (",", "–")
    words = [text(n, first) for n in range(same)]
    if len(told) - same == 1:
        words.append(f"{text(same, first)}{to}{last[same]}")
    elif same < len(told):
        words.append(to.join(joint.join(text(n, end) for n in range(same, len(told))) for end in (first, last)))
    return joint.join(words)


def _place(layout: Layout, cuts: Iterable[tuple[int, ...]], pieces: Iterable[int]) -> dict[int, int]:
    """The coordinates, by axis, of the ranks that hold a piece of each cut."""
    at: dict[int, int] = {}
    for axes, piece in zip(cuts, pieces, strict=True):
        at |= _digits(layout, axes, piece)
    return at


def _digits(layout: Layout, axes: Sequence[int], index: int) -> dict[int, int]:
    found = {}
    for axis in reversed(axes):
        index, found[axis] = divmod(index, layout.grid[axis])
    return found


def _index(layout: Layout, axes: Sequence[int], place: Mapping[int, int] | Sequence[int]) -> int:
    index = 0
    for axis in axes:
        index = index * layout.grid[axis] + place[axis]
    return index


def _rank(layout: Layout, at: dict[int, int]) -> int:
    index = 0
    for axis, size in enumerate(layout.grid):
        index = index * size + at.get(axis, 0)
    return layout.ranks[index]


def _box(intervals: Iterable[Interval]) -> Box:
    intervals = tuple(intervals)
    return Box(tuple(start for start, _ in intervals), tuple(stop - start for start, stop in intervals))
