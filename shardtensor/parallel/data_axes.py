"""Which ranks hold copies of a tensor along the data axes of a mesh, and equal values of the copies to start from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm.group import Group, group_along
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError
from shardtensor.mesh import coordinate
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


@attrs.frozen(eq=False)
class DataAxes:
    """The axes along which ranks are given other parts of the batch.

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
        """Find the axes in a mesh; a group without a mesh is one axis, of any name.

        Raises:
            LayoutError: the mesh has no such axis.
        """
        names = tuple(name.strip() for name in axes.split("*")) if isinstance(axes, str) else tuple(axes)
        whole = as_group(process_group)
        mesh = whole.mesh
        if not names or len(set(names)) != len(names):
            raise LayoutError("name each data axis once", {"axes": ", ".join(names) or "(none)"})
        if mesh is None:
            if len(names) > 1:
                raise LayoutError(
                    "the process group has one axis, not several",
                    {"axes": ", ".join(names), "group": f"{whole.size} ranks"},
                    "pass the DeviceMesh that has these axes as process_group",
                )
            return cls(names, whole, whole, (tuple(whole.ranks),))
        data = group_along(whole, names)
        along = tuple(mesh.ranks_along(whole.rank, (mesh.names.index(name),)) for name in names)
        return cls(names, whole, data, along)

    def copies(self, name: str, tensor: torch.Tensor) -> tuple[Group, float]:
        """Return the data ranks that hold copies of what this rank holds of a tensor, and their share of all of them.

        A plain tensor, and a sharded one of a group that holds no other data rank, is copied on all: share 1.

        Raises:
            LayoutError: the tensor is neither whole nor cut along a data axis.
        """
        if not isinstance(tensor, ShardedTensor):
            return self.data, 1.0
        is_cut = [self._is_cut(name, tensor, i) for i in range(len(self.names))]
        if not any(is_cut):
            return self.data, 1.0
        kept = [axis for axis, cut in zip(self.names, is_cut, strict=True) if not cut]
        group = group_along(self.whole, kept) if kept else self.whole.subgroup([self.whole.rank])
        return group, group.size / self.data.size

    def _is_cut(self, name: str, tensor: ShardedTensor, axis: int) -> bool:
        ranks, layout = self.along[axis], tensor._layout
        inside = [rank for rank in ranks if rank in tensor._group.ranks]
        if len(ranks) == 1 or inside in ([], [self.whole.rank]):
            return False
        places = [coordinate(layout.ranks, layout.grid, rank) for rank in ranks]
        kinds = {None if place is None else tuple(place[i] for i in layout.parting_axes) for place in places}
        addends = {None if place is None else tuple(place[i] for i in layout.partial_axes) for place in places}
        if len(inside) == len(ranks):
            if sum(place is not None for place in places) == 1:  # one of them holds it, the others nothing
                return True
            if len(kinds) == 1 and len(addends) == 1:
                return False
            if len(kinds) == len(ranks) and None not in kinds:
                return True
        raise LayoutError(
            f'`{name}` is neither whole nor cut along the data axis "{self.names[axis]}"',
            {
                "spec": str(tensor.sharding_spec()),
                "its ranks": ", ".join(map(str, tensor._group.ranks)),
                "the axis": ", ".join(map(str, ranks)),
            },
            "give it a spec that does not name the axis, on the mesh that has it",
        )


@torch.no_grad()
def take_first_copies(named: Iterable[tuple[str, torch.Tensor]], axes: DataAxes) -> None:
    """Overwrite tensors with what the first data rank that holds a copy has; one message a group, dtype and device.

    All ranks of the mesh call it, with the same tensors. What is on the meta device has no values yet.
    """
    kinds: dict[Any, tuple[Group, dict[int, torch.Tensor]]] = {}
    for name, tensor in named:
        local = local_of(tensor)
        group, _ = axes.copies(name, tensor)
        if group.size > 1 and not local.is_meta:
            kinds.setdefault((id(group), local.dtype, local.device), (group, {}))[1].setdefault(id(local), local)
    for group, found in kinds.values():
        locals_ = [local.detach() for local in found.values()]
        sizes = [local.numel() for local in locals_]
        if not sum(sizes):
            continue
        flat = group.broadcast(torch.cat([local.reshape(-1) for local in locals_]))
        if group.index != 0:
            for local, values in zip(locals_, flat.split(sizes), strict=True):
                local.copy_(values.view(local.shape))
