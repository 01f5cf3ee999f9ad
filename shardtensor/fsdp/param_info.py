"""One parameter of a group: its names and modules, and how it is sharded over data ranks and, before, over other axes.

If a parameter was sharded before, the data ranks gather this rank's part of it, and modules still compute with a
ShardedTensor over that part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations
from typing import Any

import attrs
import torch
import torch.distributed as dist

from shardtensor.comm.agree import name_ranks
from shardtensor.comm.group import Group
from shardtensor.comm.process_group import as_group, simulated
from shardtensor.errors import LayoutError
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.layout.layout import MeshLayout, has_equal_parts
from shardtensor.layout.ranges import ANYWHERE, Ranges, ShardPlacement, lay_out, lay_out_alone
from shardtensor.mesh import Mesh
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.tensor.dispatch import is_dtensor
from shardtensor.tensor.dtensor import as_dtensor, parameter_of
from shardtensor.tensor.memory import Location
from shardtensor.tensor.placing import spec_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap

_PARALLELIZE = 'parallelize_module(module, mesh["tp"], plan)'


@attrs.frozen(eq=False)
class TPSpec:
    """How a parameter was sharded over other axes, and the group that has these axes and the data axis.

    Attributes:
        layout, spec, group: of the parameter as modules compute with it.
        joint: the group of all these axes.
        axis: the name of the data axis in `joint`.
        joint_spec: the spec, with the axis names of `joint`.
        dtensor: the DeviceMesh and placements, if modules compute with a DTensor.
    """

    layout: MeshLayout
    spec: ShardingSpec
    group: Group
    joint: Group
    axis: str
    joint_spec: Spec
    dtensor: tuple[Any, Any] | None = None

    @classmethod
    def of(cls, name: str, param: torch.Tensor, data_mesh: DataMesh, mesh: Any, dtensor: Any = None) -> TPSpec | None:
        """Return the TP spec of a parameter; None if it is plain.

        Args:
            mesh: the user's argument for the data ranks.
            dtensor: the DTensor that `param` was made from, if any.

        Raises:
            LayoutError: data ranks hold different parts of it, or no known mesh has all the axes.
        """
        if not isinstance(param, ShardedTensor):
            return None
        layout, group = param._layout, param._group
        spec = param.sharding_spec()
        if not isinstance(layout, MeshLayout) or layout.partial:
            raise _refusal(name, param, "is sharded in a way that its parts cannot be cut further")
        for joint in _joint_groups(group, mesh):
            grid = joint.mesh
            assert grid is not None
            cut = {grid.names[i] for i in layout.sharding_axes} if joint is group else set()
            axes = _axes_of(grid, data_mesh.shard, cut)
            cut_axes = (grid.names if joint is group else _axes_of(grid, group, {*axes})) if axes else None
            if not axes or not cut_axes:
                continue
            if joint is group and (layout.grid != grid.sizes or layout.ranks != grid.ranks):
                raise _refusal(name, param, "is not sharded over all of its mesh")
            if dtensor is not None and joint is group:
                raise LayoutError(
                    f"`{name}` is a DTensor on a mesh which has the data axis {', '.join(axes)}, too",
                    {"placements": ", ".join(map(repr, dtensor.placements)), "mesh": repr(dtensor.device_mesh)},
                    "put it on the other axis alone, and let fully_shard add the data axis: "
                    f'{_PARALLELIZE}, then fully_shard(module, mesh=mesh["dp"])',
                )
            if len(axes) > 1:
                raise _refusal(name, param, f"would be cut over the axes {', '.join(axes)} at once")
            if cut & set(axes):
                raise _refusal(name, param, f"is cut over the data axis {axes[0]} already")
            named = _in_names(layout, param, cut_axes)
            if joint is group and isinstance(spec, Spec) and not spec.named and ... not in spec.dims:
                named = spec
            seen = None if dtensor is None else (dtensor.device_mesh, dtensor.placements)
            return cls(layout, spec, group, joint, axes[0], named, seen)
        call = "shard_module(module, plan, process_group=mesh)" if dtensor is None else _PARALLELIZE
        is_same = list(group.ranks) == list(data_mesh.shard.ranks)
        raise LayoutError(
            f"`{name}` is sharded over "
            + ("the data ranks already" if is_same else "ranks that no mesh joins with the data ranks"),
            {"spec": str(spec), "its ranks": _first_ranks(group), "data ranks": _first_ranks(data_mesh.shard)},
            f'shard it on a mesh that has both axes: {call}, then fully_shard(module, mesh=mesh["dp"])',
        )

    @property
    def has_copies(self) -> bool:
        """Whether several ranks of `group` hold each element."""
        return math.prod(self.layout.grid[axis] for axis in self.layout.sharding_axes) < len(self.layout.ranks)

    def around(self, view: torch.Tensor) -> torch.Tensor:
        """Return a ShardedTensor or DTensor over the gathered part, as modules expect it."""
        unsharded_params: Any = wrap(view, self.layout, self.spec, self.group)
        if self.dtensor is not None:
            unsharded_params = as_dtensor(unsharded_params, *self.dtensor)
        unsharded_params._is_param = True
        return unsharded_params


@attrs.define(eq=False)
class ParamInfo:
    """One parameter: its name in the unit, the object, the modules that own it under some name, and how it is sharded.

    `tp_spec` describes how it was sharded before over other axes, if it was; data ranks then gather this rank's part.
    `dtensor` is the DTensor that the modules held, if any; it cannot be changed in place, so `param` replaces it.
    """

    name: str
    param: torch.Tensor
    locations: list[Location]
    placement: ShardPlacement = ANYWHERE
    tp_spec: TPSpec | None = None
    dtensor: Any = None

    @classmethod
    def of(cls, name: str, param: torch.Tensor) -> ParamInfo:
        """Return the info of a parameter, without modules yet."""
        return cls(name, parameter_of(param), [], dtensor=param) if is_dtensor(param) else cls(name, param, [])

    @property
    def values(self) -> torch.Tensor:
        """The values before sharding, replicated on the data ranks: the parameter, or its local tensor."""
        return (self.param._local if isinstance(self.param, ShardedTensor) else self.param).detach()

    @property
    def grain(self) -> int:
        """The number of consecutive elements that stay on one rank."""
        return self.placement.grain(tuple(self.values.shape))

    def may_be_summed(self, has_neighbours: bool) -> bool:
        """Whether ranks other than the data ranks may compute with replicas of it, and so sum its gradients.

        Args:
            has_neighbours: whether parameters of the same group are sharded over other axes.
        """
        if self.tp_spec is not None:
            return self.tp_spec.has_copies
        return has_neighbours or any(getattr(owner, "sums_gradients", False) for owner, _ in self.locations)

    @property
    def is_alone(self) -> bool:
        """Whether it needs a group of its own, because its parts along other axes differ in size."""
        return self.tp_spec is not None and not has_equal_parts(self.tp_spec.layout)

    def sizes(self, ranges: Ranges, index: int) -> tuple[int, ...] | None:
        """Return how many elements of it each data rank holds, for its spec; None if the spec needs no sizes.

        The spec must be the same on all ranks, also on those that hold other parts.
        """
        if not self.is_alone:
            return ranges.sizes(index)
        if self.placement.dim is None:
            return None
        rows = lay_out_alone(self.values.shape[self.placement.dim], ranges.ranks).sizes(0)
        return tuple(count * self.grain for count in rows)


def ranges_of(params_info: Sequence[ParamInfo], ranks: int) -> Ranges:
    """Return the ranges of a flat buffer of parameters that are gathered together."""
    lengths = [info.values.numel() for info in params_info]
    if params_info[0].is_alone:
        return lay_out_alone(lengths[0], ranks, params_info[0].grain)
    return lay_out(lengths, ranks, [info.grain for info in params_info])


def _joint_groups(group: Group, mesh: Any) -> Iterator[Group]:
    """Yield groups with named axes that may contain both the parameter's axes and the data axis."""
    if group.mesh is not None:
        yield group
    if isinstance(mesh, dist.DeviceMesh):
        root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else None
        if root is not None and root is not mesh and root.ndim > 1:
            yield as_group(root)
    world = simulated.get()
    if world is not None and world.mesh is not None and world is not group:
        yield world


def _axes_of(grid: Mesh, group: Group, others: AbstractSet[str]) -> tuple[str, ...] | None:
    """Return the axes of a grid along which the ranks of a group lie, in its order; the last ones that fit.

    A single rank lies along every axis of size 1: it prefers axes that are not in `others`, which are used already.
    """
    second, numbers = None, range(len(grid.names))
    for count in numbers:
        for axes in reversed(list(combinations(numbers, count + 1))):
            if grid.ranks_along(group.rank, axes) == tuple(group.ranks):
                names = tuple(grid.names[i] for i in axes)
                if not others & {*names}:
                    return names
                second = second or names
    return second


def _in_names(layout: MeshLayout, param: ShardedTensor, names: tuple[str, ...]) -> Spec:
    """Return the spec of a layout with the axis names of another mesh."""
    spec = spec_of(attrs.evolve(layout, names=names), param.device)
    if not isinstance(spec, Spec) or len(names) != len(layout.grid):
        raise _refusal("a parameter", param, "is sharded by a spec that names no axes")
    return spec


def _first_ranks(group: Group) -> str:
    return name_ranks(group.ranks[:16])


def _refusal(name: str, param: ShardedTensor, what: str) -> LayoutError:
    return LayoutError(
        f"`{name}` {what}",
        {"spec": str(param.sharding_spec()), "its ranks": _first_ranks(param._group)},
        "leave it out: ignored_params=[...]; or shard it by a spec such as [tp, -] over other axes",
    )
