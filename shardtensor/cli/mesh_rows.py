"""A mesh as a small table of ranks: the last axes across, the others down; long ones with their middle left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from shardtensor.plan.axes import Axes

ACROSS, DOWN = 16, 8


@attrs.frozen
class MeshRows:
    """Some of the ranks of a mesh.

    Attributes:
        across: the axes across, as they are called, major first; those of one rank only where there are no others.
        columns: what stands above each column; empty where ranks are left out.
        rows: what stands before each row, and its ranks; None where ranks are left out.
    """

    across: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[int | None, ...]], ...]


def mesh_rows(axes: Axes, across: int = ACROSS, down: int = DOWN) -> MeshRows:
    """Choose the ranks of a mesh that are shown.

    Example:
        >>> from shardtensor.mesh import read_mesh
        >>> found = mesh_rows(Axes(read_mesh("dp=100, tp=2")), down=3)
        >>> found.columns, found.rows
        (('tp 0', '1'), (('dp 0', (0, 1)), ('', (None, None)), ('99', (198, 199))))
    """
    mesh = axes.mesh
    names, sizes = tuple(_called(axes, name) for name in mesh.names), mesh.sizes
    split = len(sizes) - 1
    while split and math.prod(sizes[split - 1 :]) <= across and (split > 1 or _is_factor(axes, mesh.names[0])):
        split -= 1
    width, height = math.prod(sizes[split:]), math.prod(sizes[:split])
    shown = [_picked(height, down), _picked(width, across)]
    columns = tuple("" if i is None else _label(names[split:], sizes[split:], i) for i in shown[1])
    rows = []
    for row in shown[0]:
        cells = (None if row is None or i is None else mesh.ranks[row * width + i] for i in shown[1])
        rows.append(("" if row is None else _label(names[:split], sizes[:split], row), tuple(cells)))
    wide = tuple(names[i] for i in range(split, len(names)) if sizes[i] > 1) or names[split:]
    return MeshRows(wide, columns, tuple(rows))


def mesh_text(axes: Axes) -> str:
    """The axes and their sizes, those that are made of others with them.

    Example:
        >>> from shardtensor.mesh import read_mesh
        >>> mesh_text(Axes(read_mesh("dp=2, kvg=4, kvr=2"), {"tp": ("kvg", "kvr")}))
        'dp 2 × tp 8 (kvg 4 × kvr 2)'
    """
    words, rest = [], list(axes.mesh.axes)
    while rest:
        first = rest[0][0]
        whole = next((name for name, factors in axes.made_of.items() if factors[0] == first), None)
        count = 1 if whole is None else len(axes.made_of[whole])
        parts = " × ".join(f"{factor} {n}" for factor, n in rest[:count])
        words.append(parts if whole is None else f"{whole} {axes.size(whole)} ({parts})")
        rest = rest[count:]
    return " × ".join(words)


def _called(axes: Axes, name: str) -> str:
    """The axis that a factor alone makes, for its other factors have one rank; else the factor."""
    return next(
        (each for each, factors in axes.made_of.items() if name in factors and axes.size(each) == axes.size(name)), name
    )


def _is_factor(axes: Axes, name: str) -> bool:
    return any(name in factors for factors in axes.made_of.values())


def _picked(count: int, limit: int) -> list[int | None]:
    """The first numbers below `count` and the last; None for those between."""
    if count <= limit:
        return list(range(count))
    return [*range(max(limit - 2, 1)), None, count - 1]


def _label(names: Sequence[str], sizes: Sequence[int], index: int) -> str:
    """The coordinates of a row or column; the names of the axes only in the first one."""
    at = []
    for size in reversed(sizes):
        index, i = divmod(index, size)
        at.append(i)
    shown = [(name, i) for name, size, i in zip(names, sizes, reversed(at), strict=True) if size > 1 or len(sizes) == 1]
    if not any(i for _, i in shown):
        return ", ".join(f"{name} {i}" for name, i in shown if name != "*")
    return ",".join(str(i) for _, i in shown)
