"""A picture of a layout: a map of which rank holds what, as cells or as HTML, and the meaning of its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby, islice, product

import attrs

from shardtensor.layout.box import Box
from shardtensor.layout.holders import holders
from shardtensor.layout.layout import FlatLayout, Layout, MeshLayout
from shardtensor.mesh import coordinate, index_along

WIDTH, HEIGHT, MOST_LINES = 16, 4, 16
EVERYBODY = -1
"""The number in a cell that all ranks hold."""

MOST_SHARDS = 4096
"""Of more shards only the first and the last ones are measured."""

_COLOURS = (69, 215, 79, 175, 185, 173, 117, 140)  # of the 256 of a terminal
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@attrs.frozen(eq=False)
class Picture:
    """A layout with the names of its axes. Its shards are numbered row-major over the axes of its cuts.

    Attributes:
        names: of the axes, by number.
        made_of: by the name of an axis that is made of others, the names of these.
    """

    layout: Layout
    names: tuple[str, ...]
    made_of: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """The axes of each cut, by their numbers in the grid, major first."""
        layout = self.layout.inner if isinstance(self.layout, FlatLayout) else self.layout
        if not isinstance(layout, MeshLayout):
            return (layout.sharding_axes,)
        flat = (self.layout.axes,) if isinstance(self.layout, FlatLayout) else ()
        return (*(cut.axes for cut in layout.dims if cut is not None), *flat)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which ranks hold different elements, without axes of one rank."""
        return tuple(axis for cut in self.cuts for axis in cut if self.layout.grid[axis] > 1)

    @property
    def count(self) -> int:
        """The number of shards."""
        return math.prod(self.layout.grid[axis] for axis in self.axes)

    @property
    def copies(self) -> int:
        """The number of ranks that hold each shard."""
        return len(self.layout.ranks) // self.count

    @property
    def ends(self) -> tuple[int, int]:
        """The least and the most elements of a shard."""
        every = range(self.count)
        shards = every if self.count <= MOST_SHARDS else (*every[:64], *every[-64:])
        sizes = [self.layout.numel(self.ranks(index, 1)[0]) for index in shards]
        return min(sizes), max(sizes)

    def index_of(self, rank: int) -> int:
        """Return the shard that a rank holds."""
        place = coordinate(self.layout.ranks, self.layout.grid, rank)
        assert place is not None, "a rank of the layout"
        return index_along(self.axes, self.layout.grid, place)

    def ranks(self, index: int, limit: int = 8) -> tuple[int, ...]:
        """Return the first ranks that hold a shard."""
        at, grid = self._place(index), self.layout.grid
        every = product(*([at[axis]] if axis in at else range(size) for axis, size in enumerate(grid)))
        return tuple(self.layout.ranks[index_along(range(len(grid)), grid, place)] for place in islice(every, limit))

    def number(self, index: int) -> int:
        """Return the number that is drawn in a shard and selects its colour: its rank, if it has one."""
        return self.ranks(index, 1)[0] if self.copies == 1 else index

    def cells(self) -> list[list[int | None]]:
        """Return the rows of a map: the number of the shard of each cell, `EVERYBODY`, or None. The dims up to the last
        one that is sharded go down, without it; if none of these is sharded, there is one row."""
        shape = self.layout.shape
        if not all(shape):
            return []
        split = len(shape) - 1
        if isinstance(self.layout, MeshLayout):
            split = max((dim for dim, cut in enumerate(self.layout.dims) if cut is not None), default=0)
        split = max(split, 1) if len(shape) > 1 else 0
        lines = len([*groupby(self._cells(split, MOST_LINES))])
        return self._cells(split, 1 if lines == 1 else max(HEIGHT, lines))

    def _cells(self, split: int, lines: int) -> list[list[int | None]]:
        """Return a map of at most `lines` rows, with the first `split` dims down and the others to the right."""
        shape, layout = self.layout.shape, self.layout.reduced()
        rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
        height, width = min(rows, lines), min(columns, WIDTH)
        if not self.axes:
            return [[EVERYBODY] * width for _ in range(height)]
        numbers: dict[int, int] = {}

        def cell(line: int, place: int) -> int | None:
            at = (*_at(line * rows // height, shape[:split]), *_at(place * columns // width, shape[split:]))
            for rank in holders(layout, Box(at, (1,) * len(at))):
                if rank not in numbers:
                    numbers[rank] = self.number(self.index_of(rank))
                return numbers[rank]
            return None

        return [[cell(line, place) for place in range(width)] for line in range(height)]

    def legend(self) -> list[tuple[int, str]]:
        """Return the meaning of the numbers of a map: of all if there are at most four, else of the first two and the
        last."""
        found = []
        for index in range(self.count) if self.count <= 4 else (0, 1, self.count - 1):
            ranks = self.ranks(index, 2)
            names = "" if self.names == ("place",) else f" {self.place_text(index)},"
            text = f"{names} rank{'s' * (self.copies > 1)} {', '.join(map(str, ranks))}"
            text += ", …" * (self.copies > len(ranks)) + " (nothing)" * (not self.layout.numel(ranks[0]))
            found.append((self.number(index), text))
        return found

    def place_text(self, index: int) -> str:
        """Return the coordinates of a shard's ranks as text: ``tp 1, dp 0``."""
        at = [self._place(index).get(axis, 0) for axis in range(len(self.layout.grid))]
        named = (each for cut in self.cuts for each in self.named_axes(cut))
        return ", ".join(f"{name} {index_along(group, self.layout.grid, at)}" for name, group in named)

    def _place(self, index: int) -> dict[int, int]:
        """Return the coordinates of a shard along its axes."""
        found = {}
        for axis in reversed(self.axes):
            index, found[axis] = divmod(index, self.layout.grid[axis])
        return found

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
    layout: Layout, names: Sequence[str] = (), made_of: Mapping[str, tuple[str, ...]] | None = None
) -> Picture:
    """Return the picture of a layout.

    Args:
        names: of the mesh's axes, for a layout without names.
        made_of: the names of axes that are made of others, with the names of these.

    Example:
        >>> from shardtensor.layout.bind import bind
        >>> from shardtensor.mesh import read_mesh
        >>> from shardtensor.spec.parse import parse_spec
        >>> picture = picture_of(bind(parse_spec("[tp, -]"), (8, 6), read_mesh("dp=2, tp=4")))
        >>> picture.place_text(1), picture.ranks(1), [row[0] for row in picture.cells()]
        ('tp 1', (1, 5), [0, 1, 2, 3])
    """
    grid = layout.grid
    axis_names = layout.names or (tuple(names) if len(names) == len(grid) else ())
    labels = axis_names or tuple(f"place{i}" if len(grid) > 1 else "place" for i in range(len(grid)))
    return Picture(layout, labels, made_of or {})


def _at(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element at a place of a row-major tensor."""
    found = []
    for size in reversed(shape):
        place, i = divmod(place, size)
        found.append(i)
    return tuple(reversed(found))


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
