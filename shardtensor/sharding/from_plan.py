"""From a `Plan`, or rules of a part, and a module to the work: each tensor and path of the module with what it gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group, group_on_mesh
from shardtensor.errors import LayoutError, PlanError, RuleError, ShardTensorError
from shardtensor.mesh import Mesh
from shardtensor.parallel.layers import layer_class
from shardtensor.parallel.parameter import bound, find, shards_itself
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.report import folded, text_report
from shardtensor.plan.flows.flow import cuts
from shardtensor.plan.flows.gradients import Flows, flows_of
from shardtensor.plan.flows.modules import Stated
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Passing, Resolved, canonical_lines
from shardtensor.sharding.model_info import model_info
from shardtensor.sharding.plan import ShardingPlan
from shardtensor.sharding.rules import Rules, axes_of_flows, read_rules, with_the_rest
from shardtensor.sharding.stores import Keeping
from shardtensor.sharding.work import Count, Target, Work
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.tensor.placing import bind_named, device_for, mesh_of


def _group_of(plan: Plan, group: Group) -> Group:
    """The ranks of a group seen as the mesh of a plan, axes that are made of others spelled out."""
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


def work_of(module: nn.Module, given: Plan | ShardingPlan | Mapping[str, Any], group: Group, src_rank: int) -> Work:
    """Match a plan, or rules of a part, to a module. Pure: reads the module, changes nothing, sends nothing."""
    if isinstance(given, Plan):
        group, rules = _group_of(given, group), Rules(given, model_info(module))
    else:
        rules = read_rules(module, given, group)
    plan, resolved = rules.plan, resolve(rules.plan, rules.model)
    fits = plan.is_part and all(x.code[:2] in ("E2", "E5") or x.code == "E404" for x in resolved.errors)
    _raise(resolved.errors, LayoutError if fits else PlanError)
    plan.axes.mesh.refuse_unknown(sorted(axes_of_flows(plan.lines)) if plan.is_part else (), PlanError)
    flows = None if plan.is_part else flows_of(resolved)
    _raise(() if flows is None else check_plan(resolved, flows), PlanError)
    targets, wholes, ties = _tensors(module, rules, resolved, group, src_rank, flows)
    if plan.is_part and resolved.modules:
        flows = flows_of(with_the_rest(module, resolved, targets), is_whole=False)
        _raise(flows.findings(), PlanError)
    paths = {unwrapped(name): name for name, _ in module.named_modules(remove_duplicate=False)}
    passings = {paths[path]: passing for path, passing in resolved.modules.items()}
    return Work(
        module,
        group,
        targets,
        rules,
        flows,
        _counts(module, passings, group, plan.axes),
        tuple((path, hook) for path, passing in passings.items() for hook, _ in passing.uses),
        wholes,
        ties,
        None if plan.is_part else Keeping.of(module, resolved),
        () if plan.is_part or flows is None else _where_only(module, targets, flows.modules.stated),
        dict(canonical_lines(resolved)) | {name: str(spec) for name, spec in rules.opaque.items()},
    )


def _raise(findings: Iterable[Finding], kind: type[ShardTensorError]) -> None:
    """Raise the errors among findings."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise kind(text_report(folded(errors)))


def _counts(root: nn.Module, passings: Mapping[str, Passing], group: Group, axes: Axes) -> tuple[Count, ...]:
    """The attributes that become this rank's share; of a module under two names once."""
    found: dict[tuple[int, str], Count] = {}
    for path, passing in passings.items():
        owner = root.get_submodule(path)
        for name, (spec, _) in passing.locals.items():
            value, spelled = getattr(owner, name), axes.spelled(spec)
            try:
                (share,) = bind_named(spelled, (value,), mesh_of(group)).local_shape(group.rank)
            except LayoutError as error:
                raise error.of(f"`{name}` of {path or 'the module'}") from None
            found.setdefault((id(owner), name), Count(path, owner, name, value, spelled, share))
    return tuple(found.values())


def _tensors(
    module: nn.Module, rules: Rules, resolved: Resolved, group: Group, src_rank: int, flows: Flows | None
) -> tuple[tuple[Target, ...], tuple[tuple[str, torch.Tensor], ...], tuple[tuple[str, str], ...]]:
    """The tensors that become ShardedTensors, those that stay plain, and those that others take the place of."""
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    names = {unwrapped(name): name for each in named for name, _ in each}
    found: dict[int, Target] = {}
    wholes: dict[int, tuple[str, torch.Tensor]] = {}
    ties = []
    for seen in (info.name for info in rules.model.tensors) if rules.plan.is_part else resolved.tensors:
        name, placed = names.get(seen, seen), resolved.tensors.get(seen)
        if flows is None:  # rules of a part: what has none stays as it is
            spec = rules.opaque.get(seen) if placed is None or placed.line is None else placed.line.value
            if spec is not None:
                _add(found, module, name, spec, group, src_rank)
            continue
        assert placed is not None
        tensor = find(module, name)[1]
        if placed.tied_to:
            other = names[placed.tied_to]
            if find(module, other)[1] is not tensor:
                ties.append((name, other))
                continue
        if placed.layout.is_replicated and not _works_on_sharded(module, name, flows.modules.stated):
            wholes.setdefault(id(tensor), (name, tensor))
            continue
        spec = resolved.plan.axes.spelled(placed.spec) if isinstance(placed.spec, Spec) else placed.spec
        _add(found, module, name, spec, group, src_rank)
    return tuple(found.values()), tuple(wholes.values()), tuple(ties)


def _add(
    found: dict[int, Target], module: nn.Module, name: str, spec: ShardingSpec, group: Group, src_rank: int
) -> None:
    """Add a tensor, or one more name of it, to those that become ShardedTensors."""
    try:
        dims, tensor = find(module, name)
        if id(tensor) in found:
            known = found[id(tensor)]
            found[id(tensor)] = attrs.evolve(known, names=(*known.names, name))
            return
        layout = None if shards_itself(spec) else bound(spec, tensor, group, dims, src_rank)
    except (LayoutError, RuleError) as error:
        raise error.of(name) from None
    device = tensor.device if layout is None else device_for(spec, group, tensor.device)
    found[id(tensor)] = Target((name,), tensor, spec, layout, device)


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
