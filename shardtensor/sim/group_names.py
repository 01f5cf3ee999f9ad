"""Names of groups of ranks, by the axes of a mesh."""

from __future__ import annotations

import math

from shardtensor.mesh import Mesh, Ranks


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
