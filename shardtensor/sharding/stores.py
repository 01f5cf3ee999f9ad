"""``store``: parameters that are fully sharded over data axes; and gradients averaged over those axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group, group_along, group_on_mesh
from shardtensor.errors import PlanError
from shardtensor.fsdp.api import fully_shard
from shardtensor.fsdp.lifecycle import release
from shardtensor.mesh import Mesh
from shardtensor.parallel.data_parallel import data_parallel, reducer_of
from shardtensor.spec.parts import Flat

_DATA_PARALLEL = "_sharding_data_parallel"
"""Marks a module that a plan made data parallel."""


@attrs.frozen(eq=False)
class GatherUnit:
    """The parameters of a module that are gathered together: over which axes they are cut, and the grain of each."""

    path: str
    axes: tuple[str, ...]
    grains: Mapping[str, int | str]


@attrs.frozen(eq=False)
class Keeping:
    """How parameters are kept, and whose gradients are added up.

    Attributes:
        data: the axes along which samples differ.
        units: inner ones first.
    """

    data: tuple[str, ...]
    units: tuple[GatherUnit, ...] = ()

    def facts(self) -> dict[str, str]:
        """What all ranks must have alike."""
        found = {"data": "*".join(self.data) or "(none)"}
        for unit in self.units:
            grains = ", ".join(f"{name} unit={grain}" for name, grain in unit.grains.items())
            found[f"store {unit.path or 'the module'}"] = f"flat({'*'.join(unit.axes)}): {grains}"
        return found

    def apply(self, module: nn.Module, group: Group) -> None:
        """Cut what is stored, and average the gradients of the rest. Collective."""
        named = dict(module.named_parameters(remove_duplicate=False))
        stored = {id(named[name]) for unit in self.units for name in unit.grains}
        rest = [param for param in named.values() if id(param) not in stored]
        for unit in self.units:
            grains = {id(named[name]): grain for name, grain in unit.grains.items()}
            axis = "_".join(unit.axes)
            fully_shard(
                module.get_submodule(unit.path),
                mesh=_domain(group, unit.axes, self.data, axis),
                shard_placement_fn=lambda param, g=grains, a=axis: _form(g.get(id(param), 1), a),  # type: ignore[misc]
                ignored_params=rest,
            )
        if not self.data or _size(group, self.data) == 1:
            return
        for owner in _owners_of(module, {id(p) for p in rest if p.requires_grad}) if self.units else [module]:
            data_parallel(owner, self.data, group, init_sync=False)
            vars(owner)[_DATA_PARALLEL] = True


def keep_as_before(module: nn.Module) -> None:
    """Undo what `Keeping` did."""
    for owner in module.modules():
        if vars(owner).pop(_DATA_PARALLEL, False) and (reducer := reducer_of(owner)) is not None:
            reducer.remove()
    release(module)


def gather_units(root: nn.Module, stored: Iterable[tuple[str, str, Flat]]) -> tuple[GatherUnit, ...]:
    """Group stored parameters by their gather unit, inner ones first.

    Args:
        stored: the name of each parameter, the path of its unit, and what is kept of it, in the axes of the mesh.

    Raises:
        PlanError: a unit is never called.
    """
    units: dict[str, GatherUnit] = {}
    for name, path, flat in stored:
        unit = units.setdefault(path, GatherUnit(path, flat.axes, {}))
        assert unit.axes == flat.axes, "resolving the plan has checked it"
        unit.grains[name] = flat.unit  # type: ignore[index]
    for unit in units.values():
        owner = root.get_submodule(unit.path)
        if type(owner).forward is nn.Module.forward and "forward" not in vars(owner):
            raise PlanError(
                f"the gather unit {unit.path or 'of the root'} is never called: it is a {type(owner).__name__}",
                fix="name modules with a forward after `by`: `by layers.*`",
            )
    return tuple(sorted(units.values(), key=lambda unit: -len(unit.path.split(".")) if unit.path else 1))


def _form(grain: int | str, axis: str) -> str | None:
    return None if grain == 1 else f"flat({axis}, unit={grain})"


def _size(group: Group, axes: Sequence[str]) -> int:
    if group.mesh is None:
        return group.size
    return math.prod(group.mesh.sizes[group.mesh.names.index(name)] for name in axes)


def _domain(group: Group, axes: tuple[str, ...], data: Sequence[str], name: str) -> Group:
    """The data ranks, those along `axes` as one axis, which is cut, and the rest of `data` before it, which repeats."""
    rest = tuple(axis for axis in data if axis not in axes)
    team = group_along(group, (*rest, *axes))
    if team.size == 1:
        return team
    ranks = tuple(team.ranks)
    if group.mesh is not None:
        ranks = group.mesh.ranks_along(group.rank, [group.mesh.names.index(axis) for axis in (*rest, *axes)])
    copies = _size(group, rest) if rest else 1
    grid = ((name, len(ranks)),) if copies == 1 else (("copies", copies), (name, len(ranks) // copies))
    return group_on_mesh(team, Mesh(grid, ranks))  # one for all units: each group has a communicator for reductions


def _owners_of(module: nn.Module, wanted: set[int]) -> list[nn.Module]:
    """The outermost modules that are called and whose parameters are all wanted."""
    params: list[torch.Tensor] = list(module.parameters())
    if not params or not any(id(param) in wanted for param in params):
        return []
    is_called = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    if is_called and all(id(param) in wanted or not param.requires_grad for param in params):
        return [module]
    return [owner for child in module.children() for owner in _owners_of(child, wanted)]
