"""The data ranks: ranks of a mesh, all or along some axes, that compute gradients of different parts of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Group, group_along, group_on_mesh
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.mesh import Mesh, coordinate
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen(eq=False)
class DataMesh:
    """The groups of data ranks, and the axis along which they shard parameters.

    Args:
        whole: all data ranks; each computes gradients of its own part of the batch.
        shard: the ranks that shard one replica of the parameters among them.
        reduce: the same ranks as `shard`, for reductions that run beside its gathers.
        replicate: the ranks that hold replicas of the same shard; None without hybrid sharding.
        axis: the name of the axis that parameters are sharded along.
    """

    whole: Group
    shard: Group
    reduce: Group
    replicate: Group | None
    axis: str

    @property
    def is_named(self) -> bool:
        """Whether `axis` is a name of the group's mesh; otherwise any name is accepted for it."""
        return self.whole.mesh is not None

    @classmethod
    def of(cls, mesh: Any) -> DataMesh:
        """Read a mesh of data ranks: of one axis, or of two, where parameters are replicated along the first.

        Args:
            mesh: a DeviceMesh or a part of one (``mesh["dp"]``), a process group, None for the default group; or the
                names of axes of the default mesh, ``"dp"`` or ``"rep*dp"``; ``("rep", "dp")`` is the same.

        Raises:
            LayoutError: it has more axes, a name is unknown, or this rank is not in it.
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
            return cls(whole, whole, whole.with_new_communicator(), None, names[-1])
        if len(grid.names) == 1:
            return cls(whole, whole, whole.with_new_communicator(), None, grid.names[0])
        if len(grid.names) > 2:
            raise LayoutError(
                f"fully_shard takes a mesh of one or two axes, not {len(grid.names)}",
                {"mesh": ", ".join(f"{name}={size}" for name, size in grid.axes)},
                'name the data axes: mesh["dp"], or mesh["rep", "dp"] to repeat along the first',
            )
        rep, dp = grid.names
        shard = whole.axis(dp)
        return cls(whole, shard, shard.with_new_communicator(), whole.axis(rep), dp)


def _named(text: str) -> Group:
    """Return the group of ranks along axes of the default mesh."""
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
    group = world.axis(*names)
    axes = tuple((name, grid.sizes[grid.names.index(name)]) for name in names)
    return group_on_mesh(group, Mesh(axes, group.ranks)) if len(names) > 1 else group


@attrs.frozen(eq=False)
class DataAxes:
    """The axes along which ranks have different parts of the batch.

    Attributes:
        names: of the axes.
        whole: all ranks of the mesh.
        data: this rank and those that differ from it along these axes only.
        along: for each axis, this rank and those that differ from it along that axis only.
    """

    names: tuple[str, ...]
    whole: Group
    data: Group
    along: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, axes: str | Sequence[str], process_group: Any) -> DataAxes:
        """Return the data axes of a mesh; a group without a mesh is one axis, of any name."""
        names = tuple(name.strip() for name in axes.split("*")) if isinstance(axes, str) else tuple(axes)
        whole = as_group(process_group)
        mesh = whole.mesh
        if not names or len(set(names)) != len(names):
            raise LayoutError("name each data axis once", {"axes": ", ".join(names) or "(none)"})
        if mesh is None and len(names) > 1:
            raise LayoutError(
                "the process group has one axis, not several",
                {"axes": ", ".join(names), "group": f"{whole.size} ranks"},
                "pass the DeviceMesh that has these axes as process_group",
            )
        data = group_along(whole, names)
        if mesh is None:
            return cls(names, whole, data, (tuple(whole.ranks),))
        return cls(names, whole, data, tuple(mesh.ranks_along(whole.rank, (mesh.names.index(n),)) for n in names))

    def copies(self, name: str, tensor: torch.Tensor) -> tuple[Group, float]:
        """Return the data ranks that hold replicas of this rank's part of a tensor, and their share of all data ranks.

        A plain tensor, or a sharded one of a group without other data ranks, is replicated on all: share 1.
        """
        if not isinstance(tensor, ShardedTensor):
            return self.data, 1.0
        kept = [axis for i, axis in enumerate(self.names) if not self._is_cut(name, tensor, i)]
        if len(kept) == len(self.names):
            return self.data, 1.0
        group = group_along(self.whole, kept) if kept else self.whole.subgroup([self.whole.rank])
        return group, group.size / self.data.size

    def _is_cut(self, name: str, tensor: ShardedTensor, axis: int) -> bool:
        ranks, layout = self.along[axis], tensor._layout
        inside = [rank for rank in ranks if rank in tensor._group.ranks]
        if len(ranks) == 1 or inside in ([], [self.whole.rank]):
            return False
        places = [coordinate(layout.ranks, layout.grid, rank) for rank in ranks]
        pieces = [None if place is None else tuple(place[i] for i in layout.sharding_axes) for place in places]
        partials = {None if place is None else tuple(place[i] for i in layout.partial_axes) for place in places}
        held = [piece for piece in pieces if piece is not None]
        if len(inside) == len(ranks):
            if len(held) == 1 or len(set(held)) == len(ranks):  # one holds it all, or each has a different shard
                return True
            if len(set(pieces)) == 1 and len(partials) == 1:
                return False
        raise LayoutError(
            f'`{name}` is neither whole nor cut along the data axis "{self.names[axis]}"',
            {
                "spec": str(tensor.sharding_spec()),
                "its ranks": ", ".join(map(str, tensor._group.ranks)),
                "the axis": ", ".join(map(str, ranks)),
            },
            "give it a spec that does not name the axis, on the mesh that has it",
        )
