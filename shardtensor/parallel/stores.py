"""``store``: parameters that are fully sharded over data axes; and gradients averaged over those axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group, group_along, group_on_mesh
from shardtensor.errors import PlanError
from shardtensor.fsdp.api import fully_shard
from shardtensor.fsdp.data_parallel import data_parallel, reducer_of
from shardtensor.fsdp.lifecycle import release
from shardtensor.mesh import Mesh
from shardtensor.parallel.model_info import modules_by_path
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.match.units import GatherUnit, gather_units
from shardtensor.plan.resolved import Resolved

_DATA_PARALLEL = "_sharding_data_parallel"
"""Marks a module that a plan made data parallel."""


@attrs.frozen(eq=False)
class FSDPConfig:
    """Which parameters are fully sharded, and over which axes gradients are averaged.

    Attributes:
        data: the axes along which samples differ.
        mesh: of the plan.
        units: which parameters are gathered together, inner units first.
    """

    data: tuple[str, ...]
    mesh: Mesh
    units: tuple[GatherUnit, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, resolved: Resolved) -> FSDPConfig:
        """Return what a plan stores of a module; raise PlanError if a unit is never called."""
        axes, owners = resolved.plan.axes, modules_by_path(module)
        units = gather_units(resolved)[::-1]
        for unit in units:
            owner = owners[unit.path]
            if not is_called(owner):
                raise PlanError(
                    f"the gather unit {unit.path or 'of the root'} is never called: it is a {type(owner).__name__}",
                    fix="name modules with a forward after `by`: `by layers.*`",
                )
        return cls(tuple(axis for axis in axes.mesh.names if axis in axes.leaves(axes.data)), axes.mesh, units)

    def apply(self, module: nn.Module, group: Group) -> None:
        """Fully shard the stored parameters, and average the gradients of the rest. Collective."""
        owners, sizes = modules_by_path(module), dict(self.mesh.axes)
        named = {unwrapped(name): param for name, param in module.named_parameters(remove_duplicate=False)}
        stored = {id(named[name]) for unit in self.units for names in unit.names for name in names}
        rest = [param for param in named.values() if id(param) not in stored]
        for unit in self.units:
            axes = tuple(self.mesh.names[i] for i in unit.flats[0].axes)
            axis, forms = "_".join(axes), dict[int, str]()
            for flat, names in zip(unit.flats, unit.names, strict=True):
                grains = {id(named[name]): grain or "row" for name, grain in zip(names, flat.units, strict=True)}
                forms |= {param: f"flat({axis}, unit={grain})" for param, grain in grains.items() if grain != 1}
            fully_shard(
                owners[unit.path],
                mesh=_domain(group, axes, self.data, axis, math.prod(sizes[each] for each in axes)),
                shard_placement_fn=lambda param, found=forms: found.get(id(param)),  # type: ignore[misc]
                ignored_params=rest,
            )
        if math.prod(sizes[axis] for axis in self.data) == 1:
            return
        for owner in _owners_of(module, {id(p) for p in rest if p.requires_grad}) if self.units else [module]:
            data_parallel(owner, self.data, group, init_sync=False)
            vars(owner)[_DATA_PARALLEL] = True


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward of its own."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def keep_as_before(module: nn.Module) -> None:
    """Undo `FSDPConfig.apply`."""
    for owner in module.modules():
        if vars(owner).pop(_DATA_PARALLEL, False) and (reducer := reducer_of(owner)) is not None:
            reducer.remove()
    release(module)


def _domain(group: Group, axes: tuple[str, ...], data: Sequence[str], name: str, count: int) -> Group:
    """Return the data ranks: those along `axes` as one axis, which shards; before it, replicas along the others."""
    rest = tuple(axis for axis in data if axis not in axes)
    subgroup = group_along(group, (*rest, *axes))
    if subgroup.size == 1:
        return subgroup
    ranks = tuple(subgroup.ranks)
    if group.mesh is not None:
        ranks = group.mesh.ranks_along(group.rank, [group.mesh.names.index(axis) for axis in (*rest, *axes)])
    grid = ((name, count),) if count == len(ranks) else (("copies", len(ranks) // count), (name, count))
    return group_on_mesh(subgroup, Mesh(grid, ranks))  # one for all units: each group has a communicator for reductions


def _owners_of(module: nn.Module, ids: set[int]) -> list[nn.Module]:
    """Return the outermost modules that are called and whose parameters all have one of these `ids`."""
    params: list[torch.Tensor] = list(module.parameters())
    if not params or not any(id(param) in ids for param in params):
        return []
    if is_called(module) and all(id(param) in ids or not param.requires_grad for param in params):
        return [module]
    return [owner for child in module.children() for owner in _owners_of(child, ids)]
