"""From a `Plan` and a module to what is to be done: the plan is matched to the module's names and shapes, all faults at
once, and put in terms of the module's own tensors and paths.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group, group_on_mesh
from shardtensor.errors import LayoutError, PlanError
from shardtensor.layout.layout import Layout
from shardtensor.mesh import Mesh
from shardtensor.parallel.layers import layer_class
from shardtensor.parallel.parameter import bound, find, shards_itself
from shardtensor.plan.axes import Axes
from shardtensor.plan.canonical import canonical_lines
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.findings.folding import folded
from shardtensor.plan.findings.report import text_report
from shardtensor.plan.flows.flow import cuts
from shardtensor.plan.flows.gradients import flows_of
from shardtensor.plan.flows.modules import Stated
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.sharding.model_info import model_info
from shardtensor.sharding.passings import counts_of, hooks_of
from shardtensor.sharding.stores import Keeping, gather_units
from shardtensor.sharding.work import Target, Work
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.tensor.placing import device_for


def group_of(plan: Plan, group: Group) -> Group:
    """The ranks of a group seen as the mesh of a plan, axes that are made of others spelled out.

    Raises:
        PlanError: there are more or fewer ranks, or they have axes of their own that are others.
    """
    mesh = plan.axes.mesh
    if mesh.size != group.size:
        raise PlanError(
            f"the plan is for {mesh.size} ranks, and there are {group.size}",
            {"mesh": str(mesh)},
            f"load it for this world: load_plan(..., world={group.size})",
        )
    if group.mesh is None:
        return group if len(mesh.axes) == 1 else group_on_mesh(group, Mesh(mesh.axes, group.ranks))
    wrong = [name for name, size in group.mesh.axes if name not in plan.axes.names or plan.axes.size(name) != size]
    leaves = plan.axes.leaves(name for name in group.mesh.names if name in plan.axes.names)
    if wrong or [axis for axis in mesh.names if axis in leaves] != list(leaves):
        raise PlanError(
            "the ranks have other axes than the plan",
            {"the plan's mesh": str(mesh), "the group's mesh": str(group.mesh)},
            ["give the default group: the plan makes its axes", "make the DeviceMesh with the axes of the plan"],
        )
    return group if group.mesh.axes == mesh.axes else group_on_mesh(group, Mesh(mesh.axes, group.mesh.ranks))


def from_plan(module: nn.Module, plan: Plan, group: Group, src_rank: int) -> Work:
    """Match a plan to a module. Pure: reads the module, changes nothing, sends nothing.

    Args:
        group: all ranks, seen as the plan's mesh.

    Raises:
        PlanError: the plan has errors; its text is theirs. LayoutError: a spec does not fit these ranks.
    """
    resolved = resolve(plan, model_info(module))
    if resolved.errors:
        raise PlanError(text_report(folded(resolved.errors)))
    flows = flows_of(resolved)
    errors = [finding for finding in check_plan(resolved, flows) if finding.severity == "error"]
    if errors:
        raise PlanError(text_report(folded(errors)))
    modules = {unwrapped(name): name for name, _ in module.named_modules(remove_duplicate=False)}
    passings = {modules[path]: passing for path, passing in resolved.modules.items()}
    targets, wholes, ties = _tensors(module, resolved, group, src_rank, flows.modules.stated)
    lone = _where_only(module, targets, flows.modules.stated)
    keeping = _keeping(module, resolved, modules)
    said = {"mesh": str(plan.axes.mesh)} | dict(canonical_lines(resolved)) | keeping.facts()
    counts = counts_of(module, passings, group, plan.axes.spelled)
    return Work(module, group, targets, flows, counts, hooks_of(passings), wholes, ties, keeping, lone, said=said)


def _names(module: nn.Module) -> dict[str, str]:
    """Of all tensors: names as plans see them, and as the module has them."""
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {unwrapped(name): name for each in named for name, _ in each}


def _tensors(
    module: nn.Module, resolved: Resolved, group: Group, src_rank: int, flows: Mapping[str, Stated]
) -> tuple[tuple[Target, ...], tuple[tuple[str, torch.Tensor], ...], tuple[tuple[str, str], ...]]:
    """The tensors that become ShardedTensors, those that stay plain, and those that others take the place of."""
    names = _names(module)
    found: dict[int, Target] = {}
    wholes: dict[int, tuple[str, torch.Tensor]] = {}
    ties = []
    for placed in resolved.tensors.values():
        name = names[placed.tensor.name]
        dims, tensor = find(module, name)
        if placed.tied_to:
            other = names[placed.tied_to]
            if find(module, other)[1] is not tensor:
                ties.append((name, other))
                continue
        spec = _spelled(placed, resolved.plan.axes)
        layout = _layout(name, spec, tensor, group, dims, src_rank)
        if layout is not None and layout.is_replicated and not _works_on_sharded(module, name, flows):
            wholes.setdefault(id(tensor), (name, tensor))
            continue
        known = found.get(id(tensor))
        if known is not None:
            found[id(tensor)] = attrs.evolve(known, names=(*known.names, name))
            continue
        device = tensor.device if layout is None else device_for(spec, group, tensor.device)
        found[id(tensor)] = Target((name,), tensor, spec, layout, device)
    return tuple(found.values()), tuple(wholes.values()), tuple(ties)


def _spelled(placed: Placed, axes: Axes) -> ShardingSpec:
    return axes.spelled(placed.spec) if isinstance(placed.spec, Spec) else placed.spec


def _layout(
    name: str, spec: ShardingSpec, tensor: torch.Tensor, group: Group, dims: tuple[str, ...] | None, src_rank: int
) -> Layout | None:
    if shards_itself(spec):
        return None
    try:
        return bound(spec, tensor, group, dims, src_rank)
    except LayoutError as error:
        fault, *facts = str(error).splitlines()
        raise LayoutError("\n".join([f"{name}: {fault}", *facts])) from None


def _works_on_sharded(module: nn.Module, name: str, flows: Mapping[str, Stated]) -> bool:
    """Whether a tensor's module is of unknown kind and is given parts of values: then it works on ShardedTensors."""
    path = name.rpartition(".")[0]
    stated = flows.get(unwrapped(path))
    if stated is None or layer_class(type(module.get_submodule(path))) is not None:
        return False
    return any(cuts(flow.after) for flow in stated.ins.values())


def _where_only(module: nn.Module, targets: tuple[Target, ...], flows: Mapping[str, Stated]) -> tuple[str, ...]:
    """The layers without flows that exist on some ranks only: there they work on plain values, no other calls them."""
    found: dict[str, None] = {}
    for target in targets:
        if isinstance(target.spec, Spec) and target.spec.only_part is not None:
            for name in target.names:
                path = name.rpartition(".")[0]
                stated = flows.get(unwrapped(path), Stated())
                if not (stated.ins or stated.outs) and layer_class(type(module.get_submodule(path))) is not None:
                    found[unwrapped(path)] = None
    return tuple(found)


def _keeping(module: nn.Module, resolved: Resolved, modules: dict[str, str]) -> Keeping:
    axes, names = resolved.plan.axes, _names(module)
    data = tuple(axis for axis in axes.mesh.names if axis in axes.leaves(axes.data))
    params = dict(module.named_parameters(remove_duplicate=False))
    stored, met = [], set()
    for placed in resolved.tensors.values():
        name = names[placed.tensor.name]
        if placed.stored is None or name not in params or id(params[name]) in met:
            continue
        met.add(id(params[name]))
        flat = axes.spelled(Spec().flat(*placed.stored.axes, unit=placed.stored.unit)).flat_part
        assert flat is not None
        stored.append((name, modules[placed.unit or ""], flat))
    return Keeping(data, gather_units(module, stored))
