"""The ranks that a module is fully sharded over: along one axis it is cut, along another, if there, it is repeated."""

from __future__ import annotations

from typing import Any

import attrs

from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError


@attrs.frozen(eq=False)
class Domain:
    """Groups of ranks and the axes they lie along.

    Args:
        whole: all the ranks.
        shard: those that hold one copy together.
        reduce: the same ranks as `shard`, for reductions that run beside its gathers.
        replicate: those that hold the same part; of size 1 without hybrid sharding.
        axis: the name of the axis that is cut.
    """

    whole: Group
    shard: Group
    reduce: Group
    replicate: Group | None
    axis: str

    @property
    def size(self) -> int:
        """How many ranks compute a gradient, each of its own part of the batch."""
        return self.whole.size

    @classmethod
    def of(cls, mesh: Any) -> Domain:
        """Read a mesh: of one axis, or of two, the first of which repeats.

        Raises:
            LayoutError: it has more axes, or this rank is not in it.
        """
        whole = as_group(mesh)
        if whole.index < 0:
            raise LayoutError(
                f"rank {whole.rank} is not in the mesh that a module is to be fully sharded over",
                {"ranks": list(whole.ranks)},
                "call fully_shard on the ranks of the mesh only",
            )
        grid = whole.mesh
        if mesh is None or grid is None:
            return cls(
                whole, whole, whole.twin(), None, grid.names[-1] if grid is not None and len(grid.names) == 1 else "dp"
            )
        if len(grid.names) == 1:
            return cls(whole, whole, whole.twin(), None, grid.names[0])
        if len(grid.names) > 2:
            raise LayoutError(
                f"fully_shard takes a mesh of one or two axes, not {len(grid.names)}",
                {"mesh": ", ".join(f"{name}={size}" for name, size in grid.axes)},
                'name the data axes: mesh["dp"], or mesh["rep", "dp"] to repeat along the first',
            )
        rep, dp = grid.names
        shard = whole.axis(dp)
        return cls(whole, shard, shard.twin(), whole.axis(rep), dp)
