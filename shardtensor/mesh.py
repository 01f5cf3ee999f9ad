"""A grid of ranks with named axes. Integers only: no processes and no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import product

import attrs

from shardtensor.errors import LayoutError, ShardTensorError

Ranks = range | tuple[int, ...]


def as_ranks(ranks: Sequence[int]) -> Ranks:
    """Return `ranks` as a ``range`` when they are consecutive, else as a tuple.

    Example:
        >>> as_ranks([4, 5, 6]), as_ranks([1, 0])
        (range(4, 7), (1, 0))
    """
    if isinstance(ranks, range) and ranks.step == 1:
        return ranks
    ranks = tuple(ranks)
    if ranks and all(rank == ranks[0] + i for i, rank in enumerate(ranks)):
        return range(ranks[0], ranks[0] + len(ranks))
    return ranks


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text, in ascending order, with ranges.

    Example:
        >>> ranks_text([5, 0, 1, 2])
        '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@attrs.frozen(cache_hash=True)
class Mesh:
    """Ranks laid out row-major over named axes, the last axis fastest.

    A mesh with the single axis ``"*"`` is *unnamed*: a plain process group has one, and the one axis
    that a spec names binds to it, whatever its name.

    Args:
        axes: names and sizes, major to minor.
        ranks: the global ranks in row-major order; as many as the product of the sizes.

    Example:
        >>> mesh = Mesh((("dp", 2), ("tp", 3)))
        >>> mesh.coordinate(4), mesh.rank_at((1, 2)), mesh.ranks_along(4, (1,))
        ((1, 1), 5, (3, 4, 5))
    """

    axes: tuple[tuple[str, int], ...]
    ranks: Ranks = attrs.field(
        converter=as_ranks,
        default=attrs.Factory(lambda self: range(math.prod(size for _, size in self.axes)), takes_self=True),
    )

    def __attrs_post_init__(self) -> None:
        if self.size != len(self.ranks):
            raise LayoutError(
                f"the mesh has {self.size} places for {len(self.ranks)} ranks",
                {"mesh": str(self)},
                "make the product of the axis sizes equal to the number of ranks",
            )
        if len(set(self.names)) != len(self.names):
            raise LayoutError("two axes of the mesh have one name", {"mesh": str(self)}, "give each axis its own name")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def is_unnamed(self) -> bool:
        return self.names == ("*",)

    def refuse_unknown(self, names: Iterable[str], error: type[ShardTensorError] = LayoutError) -> None:
        """Raise an `error` that lists which of `names` are not axes of the mesh."""
        unknown = next((name for name in names if name not in self.names), None)
        if unknown is not None:
            ways = f"use one of {', '.join(self.names)}"
            if self.is_unnamed:
                ways = "pass a DeviceMesh that has this axis as process_group"
            raise error(f"no mesh axis is called `{unknown}`", {"mesh": str(self)}, ways)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a global rank in the grid; None if it is not in the mesh."""
        return coordinate(self.ranks, self.sizes, rank)

    def rank_at(self, coord: Sequence[int]) -> int:
        """Return the global rank at a coordinate of the grid."""
        return self.ranks[index_along(range(len(coord)), self.sizes, coord)]

    def ranks_along(self, rank: int, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes` (axis numbers), row-major over them in order."""
        here = self.coordinate(rank)
        if here is None:
            return ()
        places = []
        for steps in product(*(range(self.sizes[axis]) for axis in axes)):
            place = list(here)
            for axis, step in zip(axes, steps, strict=True):
                place[axis] = step
            places.append(self.rank_at(place))
        return tuple(places)

    def __str__(self) -> str:
        return "(" + ", ".join(f"{name}={size}" for name, size in self.axes) + ")"


def coordinate(ranks: Ranks, sizes: tuple[int, ...], rank: int) -> tuple[int, ...] | None:
    """Return the coordinate of `rank` in a row-major grid of `sizes` over `ranks`; None if it is not there."""
    if rank not in ranks:
        return None
    index = ranks.index(rank)
    if len(sizes) == 1:
        return (index,)
    place = []
    for size in reversed(sizes):
        index, i = divmod(index, size)
        place.append(i)
    return tuple(reversed(place))


def index_along(axes: Iterable[int], sizes: Sequence[int], place: Sequence[int]) -> int:
    """Return the row-major index of a coordinate of a grid of `sizes` over some of its axes."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + place[axis]
    return index


_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]+)\s*")


def read_mesh(mesh: str | int | Mesh) -> Mesh:
    """Return the mesh of ranks 0, 1, ... for a text, major axis first; for a number, one axis of that many ranks.

    Raises:
        LayoutError: (a ValueError) the text is no list of ``name=size``, or names an axis twice, or one of size 0.

    Example:
        >>> read_mesh("dp=2, tp=4").axes
        (('dp', 2), ('tp', 4))
        >>> str(read_mesh(3))
        '(*=3)'
    """
    if isinstance(mesh, Mesh):
        return mesh
    axes = (
        (("*", mesh),) if isinstance(mesh, int) else tuple(_axis(part, mesh) for part in mesh.strip("() ").split(","))
    )
    if any(size < 1 for _, size in axes):
        raise LayoutError("an axis of a mesh has at least one rank", {"mesh": mesh})
    return Mesh(axes)


def _axis(part: str, text: str) -> tuple[str, int]:
    found = _AXIS.fullmatch(part)
    if found is None:
        raise LayoutError(
            f'"{part.strip()}" is not an axis of a mesh',
            {"mesh": f'"{text}"'},
            'name each axis and its size, as in "tp=4" or "dp=2, tp=4"',
        )
    return found[1], int(found[2])


def name_group(mesh: Mesh, ranks: Ranks) -> str:
    """Name a group by the axes along which its ranks differ, or by its ranks.

    Example:
        >>> from shardtensor.mesh import read_mesh
        >>> grid = read_mesh("dp=2, tp=2")
        >>> name_group(grid, range(4)), name_group(grid, (1, 3)), name_group(grid, (0, 3))
        ('dp=2, tp=2', 'dp=2 (ranks 1, 3)', 'ranks 0, 3')
    """
    listed = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    along = axes_along(mesh, ranks)
    text = ", ".join(f"{mesh.names[i]}={mesh.sizes[i]}" for i in along)
    if mesh.is_unnamed and along:
        return f"all {mesh.size} ranks"
    if not along:
        return f"ranks {listed}"
    return text if len(ranks) == mesh.size else f"{text} (ranks {listed})"


def axes_along(mesh: Mesh, ranks: Ranks) -> tuple[int, ...]:
    """Return the axes such that the ranks are all those that differ only along them; () if there are none."""
    if len(ranks) < 2:
        return ()
    places = [mesh.coordinate(rank) or () for rank in ranks]
    axes = tuple(i for i in range(len(mesh.sizes)) if len({place[i] for place in places}) > 1)
    is_whole = len(ranks) == math.prod(mesh.sizes[i] for i in axes)
    return axes if is_whole and len(set(places)) == len(ranks) else ()
