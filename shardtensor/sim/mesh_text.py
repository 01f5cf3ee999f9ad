"""A mesh as text: ``"tp=4"``, ``"dp=2, tp=2"``."""

from __future__ import annotations

import re

from shardtensor.errors import LayoutError
from shardtensor.mesh import Mesh

_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]+)\s*")


def read_mesh(mesh: str | int | Mesh) -> Mesh:
    """Return the mesh of ranks 0, 1, ... that a text names, major axis first; a number is that many ranks in a row.

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
