"""The groups of ranks that exchange with one another, found from a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from shardtensor.comm.group import Group
from shardtensor.errors import RuleError
from shardtensor.layout.layout import Layout
from shardtensor.mesh import Mesh

_ALONG: WeakKeyDictionary[Group, dict[tuple[Any, ...], Group]] = WeakKeyDictionary()


def along(group: Group, layout: Layout, axes: Sequence[int]) -> Group:
    """The group of the ranks that differ from this one only along `axes` of the layout's grid.

    All ranks of the layout's grid call it. When the axes are all there is, it is `group` itself, whose other
    members then take part with nothing.
    """
    rest = [size for axis, size in enumerate(layout.grid) if axis not in axes]
    if all(size == 1 for size in rest):
        return group
    key = (layout.ranks, layout.grid, tuple(axes))
    known = _ALONG.setdefault(group, {})
    if key not in known:
        known[key] = _team(group, layout, axes)
    return known[key]


def _team(group: Group, layout: Layout, axes: Sequence[int]) -> Group:
    if len(layout.ranks) != group.size:
        raise RuleError(
            "ranks outside the tensor cannot take part in a reduction over some of its axes",
            {"tensor on": f"{len(layout.ranks)} ranks", "group of": f"{group.size} ranks"},
            "make the tensor on a process group of the ranks that hold it",
        )
    mesh = group.mesh
    if mesh is not None and (mesh.sizes, mesh.ranks) == (layout.grid, layout.ranks):
        return group.axis(*(mesh.names[axis] for axis in axes))
    mesh = Mesh(tuple((f"axis{i}", size) for i, size in enumerate(layout.grid)), layout.ranks)
    return group.subgroup(mesh.ranks_along(group.rank, axes))
