"""The shards of a tensor, merged into few enough parts to be drawn; and their map, as cells or as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby, islice, product

import attrs

from shardtensor.layout.box import Box
from shardtensor.layout.layout import FlatLayout, Layout, ListedLayout, MeshLayout

PARTS = 16
"""The approximate largest number of parts that are drawn of one tensor."""

WIDTH, HEIGHT = 16, 4
EVERYBODY = -1
"""The number in a cell that all ranks hold."""

_COLOURS = (69, 215, 79, 175, 185, 173, 117, 140)  # of the 256 of a terminal
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@attrs.frozen(eq=False)
class Part:
    """The shard at one coordinate along the sharding axes, or several adjacent ones; its ranks hold copies.

    Attributes:
        pieces: for each cut of the picture, the range of its shards, half-open; several if adjacent ones are one part.
        rank: the first rank.
        boxes: of the tensor; adjacent ones are merged.
        least, most: the elements that one of its ranks holds.
    """

    pieces: tuple[tuple[int, int], ...]
    rank: int
    boxes: tuple[Box, ...]
    least: int
    most: int

    @property
    def places(self) -> int:
        """The number of shards that it merges."""
        return math.prod(stop - start for start, stop in self.pieces)


@attrs.frozen(eq=False)
class Picture:
    """A layout in parts.

    Attributes:
        cuts: the axes of each cut, by their numbers in the grid, major first.
        names: of the axes, by number.
        parts: in order; together they cover each element of the tensor once.
        made_of: by the name of an axis that is made of others, the names of these.
    """

    layout: Layout
    cuts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    parts: tuple[Part, ...]
    made_of: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which ranks hold different elements, without axes of one rank."""
        return tuple(axis for cut in self.cuts for axis in cut if self.layout.grid[axis] > 1)

    @property
    def copies(self) -> int:
        """The number of ranks that hold each element."""
        return len(self.layout.ranks) // math.prod(self.layout.grid[axis] for axis in self.axes)

    def number(self, index: int) -> int:
        """Return the number that is drawn in a part and selects its colour: its rank, if every part has one rank."""
        return self.parts[index].rank if self.copies == 1 and all(part.places == 1 for part in self.parts) else index

    def cells(self) -> list[list[int | None]]:
        """Return the rows of a map with the numbers of the parts: see `map_cells`."""
        shape = self.layout.shape
        if not all(shape):
            return []
        held = {self.number(i): [box for box in part.boxes if box.numel] for i, part in enumerate(self.parts)}
        boxes = [held.get(i, []) for i in range(max(held) + 1)] if len(held) > 1 else [*held.values()]
        split = max((_last_cut(box.sizes, shape) for each in boxes for box in each), default=0) or 1
        down = {(box.offsets[:split], box.sizes[:split]) for each in boxes for box in each}
        rows = sum(math.prod(sizes[: _last_cut(sizes, shape)]) for _, sizes in down)  # one below the other
        return map_cells(shape, boxes, split=split, lines=min(PARTS, max(HEIGHT, rows)))

    def legend(self) -> list[tuple[int, str]]:
        """Return the meaning of the numbers of a map: of all if there are at most four, else of the first two and the
        last."""
        parts, found = self.parts, []
        shown = range(len(parts)) if len(parts) <= 4 else (0, 1, len(parts) - 1)
        for i in shown:
            ranks, count = self.ranks(parts[i], 2)
            names = "" if self.names == ("place",) else f" {self.place_text(parts[i])},"
            text = f"{names} rank{'s' * (count > 1)} {', '.join(map(str, ranks))}" + ", …" * (count > len(ranks))
            found.append((self.number(i), text + " (nothing)" * (not parts[i].most)))
        return found

    def place_text(self, part: Part) -> str:
        """Return the coordinates of a part's ranks as text: ``tp 1``, or ``tp 1, dp 0 to 31``."""
        return ", ".join(filter(None, map(self._coordinates, self.cuts, part.pieces)))

    def _coordinates(self, axes: tuple[int, ...], pieces: tuple[int, int]) -> str:
        named = self.named_axes(axes)
        ends = [_digits(self.layout, axes, i) for i in (pieces[0], pieces[1] - 1)]
        first, last = ([_index(self.layout, group, at) for _, group in named] for at in ends)
        same = next((n for n in range(len(named)) if first[n] != last[n]), len(named))
        text = ", ".join(f"{name} {i}" for (name, _), i in zip(named, first, strict=True))
        return text + (f" to {', '.join(map(str, last[same:]))}" if same < len(named) else "")

    def ranks(self, part: Part, limit: int = 8) -> tuple[tuple[int, ...], int]:
        """Return the first ranks that hold a part, and the number of all."""
        others = [axis for axis in range(len(self.layout.grid)) if axis not in self.axes]
        found = (
            _rank(self.layout, place | dict(zip(others, rest, strict=True)))
            for place in _places(self.layout, self.cuts, part.pieces)
            for rest in product(*(range(self.layout.grid[axis]) for axis in others))
        )
        return tuple(islice(found, limit)), part.places * self.copies

    def named_axes(self, axes: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names of some axes, one name for factors of one axis, and without axes of size 1."""
        found: list[tuple[str, tuple[int, ...]]] = []
        rest = tuple(axes)
        while rest:
            names = [self.names[axis] for axis in rest]
            whole = next((n for n, parts in self.made_of.items() if names[: len(parts)] == list(parts)), None)
            count = 1 if whole is None else len(self.made_of[whole])
            found.append((whole or names[0], rest[:count]))
            rest = rest[count:]
        return [(name, group) for name, group in found if math.prod(self.layout.grid[axis] for axis in group) > 1]


def picture_of(
    layout: Layout, limit: int = PARTS, names: Sequence[str] = (), made_of: Mapping[str, tuple[str, ...]] | None = None
) -> Picture:
    """Return the parts of a layout, about `limit` at most; if there are more shards, adjacent ones are merged.

    Args:
        names: of the mesh's axes, for a layout without names.
        made_of: the names of axes that are made of others, with the names of these.

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
    axis_names = layout.names or (tuple(names) if len(names) == len(grid) else ())
    labels = axis_names or tuple(f"place{i}" if len(grid) > 1 else "place" for i in range(len(grid)))
    if isinstance(layout, ListedLayout):
        cuts: tuple[tuple[int, ...], ...] = ((0,),)
    else:
        inner = layout.inner if isinstance(layout, FlatLayout) else layout
        assert isinstance(inner, MeshLayout)
        cuts = tuple(cut.axes for cut in inner.dims if cut is not None)
        cuts = (*cuts, layout.axes) if isinstance(layout, FlatLayout) else cuts
    counts = [math.prod(grid[axis] for axis in axes) for axes in cuts]
    parts = tuple(_part(layout, cuts, pieces) for pieces in product(*_runs(counts, limit)))
    return Picture(layout, cuts, labels, parts, made_of or {})


def _part(layout: Layout, cuts: Sequence[tuple[int, ...]], pieces: tuple[tuple[int, int], ...]) -> Part:
    ranks = [_rank(layout, place) for place in _places(layout, cuts, pieces)]
    held = [layout.boxes(rank) for rank in ranks]
    boxes = held[0] if len(held) == 1 else _joined(box for each in held for box in each)
    sizes = [layout.numel(rank) for rank in ranks]
    return Part(pieces, ranks[0], tuple(boxes), min(sizes), max(sizes))


def _runs(counts: Sequence[int], limit: int) -> list[list[tuple[int, int]]]:
    """Return the shards of each cut in adjacent runs, so that all cuts together have about `limit` parts."""
    each = max(1, round(limit ** (1 / max(len(counts), 1)))) if math.prod(counts) > limit else max(counts, default=1)
    steps = [-(-count // each) for count in counts]
    return [
        [(start, min(start + step, count)) for start in range(0, count, step)]
        for count, step in zip(counts, steps, strict=True)
    ]


def _joined(boxes: Iterable[Box]) -> list[Box]:
    """Merge boxes that touch and are equal in all other dims."""
    found = [box for box in boxes if box.numel]
    for dim in reversed(range(len(found[0].sizes) if found else 0)):

        def others(box: Box, dim: int = dim) -> tuple[tuple[int, ...], ...]:
            return tuple(each[:dim] + each[dim + 1 :] for each in box)

        joined: list[Box] = []
        for box in sorted(found, key=lambda box: (others(box), box.offsets[dim])):
            last = joined[-1] if joined else None
            if last is not None and others(last) == others(box) and last.ends[dim] == box.offsets[dim]:
                size = last.sizes[dim] + box.sizes[dim]
                joined[-1] = Box(last.offsets, (*last.sizes[:dim], size, *last.sizes[dim + 1 :]))
            else:
                joined.append(box)
        found = joined
    return found


def _places(
    layout: Layout, cuts: Sequence[tuple[int, ...]], pieces: Iterable[tuple[int, int]]
) -> Iterator[dict[int, int]]:
    """Yield the coordinates, by axis, of the ranks that hold some shards of each cut."""
    for chosen in product(*(range(*run) for run in pieces)):
        at: dict[int, int] = {}
        for axes, piece in zip(cuts, chosen, strict=True):
            at |= _digits(layout, axes, piece)
        yield at


def _digits(layout: Layout, axes: Sequence[int], index: int) -> dict[int, int]:
    found = {}
    for axis in reversed(axes):
        index, found[axis] = divmod(index, layout.grid[axis])
    return found


def _index(layout: Layout, axes: Sequence[int], place: Mapping[int, int]) -> int:
    index = 0
    for axis in axes:
        index = index * layout.grid[axis] + place.get(axis, 0)
    return index


def _rank(layout: Layout, at: Mapping[int, int]) -> int:
    return layout.ranks[_index(layout, range(len(layout.grid)), at)]


def map_cells(
    shape: tuple[int, ...], boxes_by_rank: Sequence[Sequence[Box]], *, split: int, lines: int
) -> list[list[int | None]]:
    """Return the rows of a map of a tensor, its first `split` dims down and the others to the right: the number of the
    first rank that holds a cell, `EVERYBODY`, or None. If no dim that goes down is sharded, there is one row.

    Args:
        lines: the largest height of the map.

    Example:
        >>> map_cells((4, 2), [[Box((0, 0), (2, 2))], [Box((2, 0), (2, 2))]], split=1, lines=4)
        [[0, 0], [0, 0], [1, 1], [1, 1]]
    """
    split = split if len(shape) > 1 else 0
    rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
    height, width = min(rows, lines), min(columns, WIDTH)
    if len({box.offsets[:split] for boxes in boxes_by_rank for box in boxes if box.numel}) <= 1:
        height = 1

    def cell(line: int, place: int) -> int | None:
        at = (*_at(line * rows // height, shape[:split]), *_at(place * columns // width, shape[split:]))
        holders = [rank for rank, boxes in enumerate(boxes_by_rank) if any(_holds(box, at) for box in boxes)]
        return EVERYBODY if len(holders) == len(boxes_by_rank) else holders[0] if holders else None

    return [[cell(line, place) for place in range(width)] for line in range(height)]


def _at(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element at a place of a row-major tensor."""
    found = []
    for size in reversed(shape):
        place, i = divmod(place, size)
        found.append(i)
    return tuple(reversed(found))


def _holds(box: Box, at: tuple[int, ...]) -> bool:
    return all(offset <= i < offset + size for offset, size, i in zip(box.offsets, box.sizes, at, strict=True))


def _last_cut(sizes: Sequence[int], shape: Sequence[int]) -> int:
    """Return the last dim along which a box is smaller than the tensor; 0 if there is none."""
    return max((dim for dim, size in enumerate(sizes) if size != shape[dim]), default=0)


def character(number: int) -> str:
    """Return the character of a number in a map."""
    return _CHARACTERS[number % len(_CHARACTERS)]


def colour(number: int) -> int:
    """Return the background of a number in a map: one of the 256 colours of a terminal."""
    return _COLOURS[number % len(_COLOURS)]


def _rgb(colour: int) -> str:
    levels = ((colour - 16) // step % 6 for step in (36, 6, 1))
    return "#" + "".join(f"{55 + 40 * level if level else 0:02x}" for level in levels)


def html_map(picture: Picture) -> str:
    """Return the map of a layout and its legend as HTML.

    Example:
        >>> from shardtensor.layout.bind import bind
        >>> from shardtensor.mesh import read_mesh
        >>> from shardtensor.spec.parse import parse_spec
        >>> html_map(picture_of(bind(parse_spec("[tp]"), (2,), read_mesh("tp=2")))).count("<span")
        4
    """

    def cell(number: int | None, count: int = 1) -> str:
        if number is None:
            return " " * count
        text, back = ("·", "#b2b2b2") if number == EVERYBODY else (character(number), _rgb(colour(number)))
        return f'<span style="color:black;background:{back}">{text * count}</span>'

    lines = ["".join(cell(number, len([*run])) for number, run in groupby(row)) for row in picture.cells()]
    names = "  ".join(cell(number) + escape(text) for number, text in picture.legend() if picture.axes)
    return "<pre>" + "\n".join(filter(None, [*lines, names])) + "</pre>"
