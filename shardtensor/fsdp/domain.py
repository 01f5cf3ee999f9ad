"""The ranks that a module is fully sharded over: along one axis it is cut, along another, if there, it is repeated."""

from __future__ import annotations

from typing import Any

import attrs

from shardtensor.comm.group import Group, group_on_mesh
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.mesh import Mesh


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
    def is_named(self) -> bool:
        """Whether `axis` is a name that the mesh gave it; else it goes by any."""
        return self.whole.mesh is not None

    @property
    def size(self) -> int:
        """How many ranks compute a gradient, each of its own part of the batch."""
        return self.whole.size

    @classmethod
    def of(cls, mesh: Any) -> Domain:
        """Read a mesh of data ranks: of one axis, or of two, the first of which repeats.

        Args:
            mesh: a DeviceMesh or a part of one (``mesh["dp"]``), a process group, None for the default group; or the
                names of axes of the default mesh, ``"dp"`` or ``"rep*dp"``; ``("rep", "dp")`` is the same.

        Raises:
            LayoutError: it has more axes, or this rank is not in it.
        """
        if isinstance(mesh, tuple | list) and mesh and all(isinstance(name, str) for name in mesh):
            mesh = "*".join(mesh)
        whole = _named(mesh) if isinstance(mesh, str) else as_group(mesh)
        if whole.index < 0:
            raise LayoutError(
                f"rank {whole.rank} is not in the mesh that a module is to be fully sharded over",
                {"ranks": list(whole.ranks)},
                "call fully_shard on the ranks of the mesh only",
            )
        grid = whole.mesh
        if mesh is None and grid is not None:
            whole, grid = whole.subgroup(list(whole.ranks)), None
        if grid is None:
            names = getattr(mesh, "mesh_dim_names", None) or (mesh if isinstance(mesh, str) else "dp",)
            return cls(whole, whole, whole.twin(), None, names[-1])
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


def _named(text: str) -> Group:
    """The ranks along axes of the default mesh."""
    world, names = as_group(None), tuple(name.strip() for name in text.replace(",", "*").split("*"))
    grid = world.mesh
    unknown = [name for name in names if grid is None or name not in grid.names]
    if grid is None or unknown:
        raise LayoutError(
            f'there is no axis "{unknown[0]}": the default group has '
            + ("no named axes" if grid is None else f"the axes {', '.join(grid.names)}"),
            {"mesh": text},
            'pass the DeviceMesh of the data ranks, mesh["dp"], or names of axes, "dp" or "rep*dp"',
        )
    team = world.axis(*names)
    axes = tuple((name, grid.sizes[grid.names.index(name)]) for name in names)
    return group_on_mesh(team, Mesh(axes, team.ranks)) if len(names) > 1 else team
