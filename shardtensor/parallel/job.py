"""The changes that a plan makes to one module: found before anything changes, compared by all ranks, then applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group, group_on_mesh
from shardtensor.errors import LayoutError, PlanError, RuleError, ShardTensorError
from shardtensor.layout.layout import Layout
from shardtensor.mesh import Mesh
from shardtensor.parallel.hooks import Site, Use, called
from shardtensor.parallel.layers import layer_class
from shardtensor.parallel.model_info import model_info, modules_by_path, own_paths
from shardtensor.parallel.module_changes import Binder, ModuleChange, module_changes
from shardtensor.parallel.parameter import bound, find, shards_itself
from shardtensor.parallel.rules import Rules, axes_of_flows, read_rules, with_the_rest
from shardtensor.parallel.sharding_plan import ShardingPlan
from shardtensor.parallel.stores import FSDPConfig
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.report import folded, text_report
from shardtensor.plan.flows.flow import cuts
from shardtensor.plan.flows.gradients import Flows, flows_of
from shardtensor.plan.flows.modules import StatedFlows
from shardtensor.plan.interop.adapters import resolve_with_adapters
from shardtensor.plan.line import Hook
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import ModuleFlows, Resolved, canonical_lines
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.tensor.placing import bind_named, device_for, mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen(eq=False)
class Target:
    """One tensor, under one name or several, and its future layout; None if its spec shards it itself."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    spec: ShardingSpec
    layout: Layout | None
    device: torch.device


_BEFORE = "_sharding_counts"
"""The attribute in which a module keeps its original counts."""


@attrs.frozen(eq=False)
class Count:
    """An attribute that becomes this rank's share: ``num_heads``, for example, becomes the rank's number of heads."""

    path: str
    module: nn.Module
    name: str
    value: int
    spec: ShardingSpec
    share: int

    def apply(self) -> None:
        vars(self.module).setdefault(_BEFORE, {}).setdefault(self.name, self.value)
        setattr(self.module, self.name, self.share)


def count_as_before(module: nn.Module) -> None:
    """Restore the original counts of a module."""
    for name, value in module.__dict__.pop(_BEFORE, {}).items():
        setattr(module, name, value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"


@attrs.frozen(eq=False, slots=False)
class ShardingJob:
    """The changes that a plan makes to a module, in the order of the plan.

    Attributes:
        module: the module; paths and names are its own.
        group: all ranks, with the axes of the plan.
        targets: tensors that become ShardedTensors.
        wholes: tensors that stay plain; the source sends its values to all ranks.
        rules: as they were read, with the other entries of torch's own plans.
        flows: the flows of values through modules, free of errors; None if the plan has no rules for modules.
        counts: attributes that become the rank's share.
        hooks: calls of hooks, with the path of each one's module.
        ties: names, each with the name of the tensor that replaces it.
        plain_layers: those without flows that compute with plain values: they exist on some ranks only.
        fsdp_config: which parameters are fully sharded, and the axes along which samples differ.
        lines: the canonical lines of the plan, as text that must be equal on all ranks.
    """

    module: nn.Module
    group: Group
    targets: tuple[Target, ...]
    rules: Rules
    flows: Flows | None = None
    counts: tuple[Count, ...] = ()
    hooks: tuple[tuple[str, Hook], ...] = ()
    wholes: tuple[tuple[str, torch.Tensor], ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    fsdp_config: FSDPConfig | None = None
    plain_layers: tuple[str, ...] = ()
    lines: Mapping[str, str] = attrs.field(factory=dict)

    def facts(self) -> dict[str, str]:
        """Return what must be equal on all ranks, as text."""
        named = [*((target.names[0], target.tensor) for target in self.targets), *self.wholes]
        found = {**self.lines, "frozen": _listed(name for name, tensor in named if not tensor.requires_grad)}
        found |= {"on the meta device": _listed(name for name, tensor in named if tensor.is_meta)}
        found |= {path: type(sharder).__qualname__ for path, sharder in self.rules.sharders}
        for path, stated in self.flows.modules.stated.items() if self.flows is not None else ():
            found |= {f"{side} of {path or 'the module'}": str(flow) for side, flow in stated.written.items()}
        found |= {f"local {c.name} of {c.path or 'the module'}": f"{c.spec} of {c.value}" for c in self.counts}
        found |= {f"use {i} of {path or 'the module'}": str(hook) for i, (path, hook) in enumerate(self.hooks)}
        found |= {f"output of {path or 'the module'}": str(spec) for path, spec in self.rules.outputs}
        return found | {f"local output of {path or 'the module'}": "yes" for path in self.rules.local_outputs}

    def changes(self, binder: Binder) -> list[ModuleChange]:
        """Return the changes of modules with a flow; raise PlanError if that is impossible or no hook takes a value."""
        if self.flows is None:
            return []
        taken = {unwrapped(path) for use in self.uses for path in use.takes}
        left = [finding for path, finding in self.flows.takers.to_hooks.items() if path not in taken]
        if left:
            raise PlanError(text_report(left))
        return module_changes(modules_by_path(self.module), self.flows, self._sharded, binder, self.plain_layers)

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """What each hook will do."""
        if self.flows is None:
            return ()
        root, modules, flows = self.module, modules_by_path(self.module), self.flows
        sites = (Site(path, root.get_submodule(path), root, self.group, flows, modules) for path, _ in self.hooks)
        return tuple(called(hook, site) for (_, hook), site in zip(self.hooks, sites, strict=True))

    @cached_property
    def _sharded(self) -> dict[str, frozenset[str]]:
        """The names of each module's own parameters that are or become ShardedTensors."""
        targets = {id(target.tensor) for target in self.targets if target.layout is not None}
        found: dict[str, set[str]] = {}
        for full, tensor in self.module.named_parameters(remove_duplicate=False):
            if id(tensor) in targets or isinstance(tensor, ShardedTensor):
                path, _, name = unwrapped(full).rpartition(".")
                found.setdefault(path, set()).add(name)
        return {path: frozenset(names) for path, names in found.items()}


def _group_of(plan: Plan, group: Group) -> Group:
    """Return the group on the mesh of a plan, with composed axes written as their parts."""
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


def work_of(
    module: nn.Module, given: Plan | ShardingPlan | Mapping[str, Any], group: Group, src_rank: int
) -> ShardingJob:
    """Match a plan, or rules of a part, to a module. Pure: reads the module, changes nothing, sends nothing."""
    if isinstance(given, Plan):
        group, rules = _group_of(given, group), Rules(given, model_info(module))
    else:
        rules = read_rules(module, given, group)
    resolved = resolve_with_adapters(rules.plan, rules.model)
    plan = resolved.plan
    fits = plan.is_part and all(x.code[:2] in ("E2", "E5") or x.code == "E404" for x in resolved.errors)
    _raise(resolved.errors, LayoutError if fits else PlanError)
    plan.axes.mesh.refuse_unknown(sorted(axes_of_flows(plan.lines)) if plan.is_part else (), PlanError)
    flows = None if plan.is_part else flows_of(resolved)
    _raise(() if flows is None else check_plan(resolved, flows), PlanError)
    targets, wholes, ties = _tensors(module, rules, resolved, group, src_rank, flows)
    if plan.is_part and resolved.modules:
        flows = flows_of(with_the_rest(module, resolved, targets), is_whole=False)
        _raise(flows.findings(), PlanError)
    paths = own_paths(module)
    module_flows = {paths[path]: each for path, each in resolved.modules.items()}
    return ShardingJob(
        module,
        group,
        targets,
        rules,
        flows,
        _counts(module, module_flows, group, plan.axes),
        tuple((path, hook) for path, each in module_flows.items() for hook, _ in each.uses),
        wholes,
        ties,
        None if plan.is_part else FSDPConfig.of(module, resolved),
        () if plan.is_part or flows is None else _where_only(module, targets, flows.modules.stated),
        dict(canonical_lines(resolved)) | {name: str(spec) for name, spec in rules.opaque.items()},
    )


def _raise(findings: Iterable[Finding], kind: type[ShardTensorError]) -> None:
    """Raise the errors among findings."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise kind(text_report(folded(errors)))


def _counts(root: nn.Module, module_flows: Mapping[str, ModuleFlows], group: Group, axes: Axes) -> tuple[Count, ...]:
    """Return the attributes that become this rank's share; each once for a module with two names."""
    found: dict[tuple[int, str], Count] = {}
    for path, each in module_flows.items():
        owner = root.get_submodule(path)
        for name, (spec, _) in each.locals.items():
            value, composed = getattr(owner, name), axes.spelled(spec)
            try:
                (share,) = bind_named(composed, (value,), mesh_of(group)).local_shape(group.rank)
            except LayoutError as error:
                raise error.of(f"`{name}` of {path or 'the module'}") from None
            found.setdefault((id(owner), name), Count(path, owner, name, value, composed, share))
    return tuple(found.values())


def _tensors(
    module: nn.Module, rules: Rules, resolved: Resolved, group: Group, src_rank: int, flows: Flows | None
) -> tuple[tuple[Target, ...], tuple[tuple[str, torch.Tensor], ...], tuple[tuple[str, str], ...]]:
    """Return the tensors that become ShardedTensors, those that stay plain, and those that others replace."""
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    names = {unwrapped(name): name for each in named for name, _ in each}
    found: dict[int, Target] = {}
    wholes: dict[int, tuple[str, torch.Tensor]] = {}
    ties = []
    for seen in (info.name for info in rules.model.tensors) if rules.plan.is_part else resolved.tensors:
        name, placed = names.get(seen, seen), resolved.tensors.get(seen)
        if flows is None:  # rules of a part: tensors without one stay as they are
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
            target = found[id(tensor)]
            found[id(tensor)] = attrs.evolve(target, names=(*target.names, name))
            return
        layout = None if shards_itself(spec) else bound(spec, tensor, group, dims, src_rank)
    except (LayoutError, RuleError) as error:
        raise error.of(name) from None
    device = tensor.device if layout is None else device_for(spec, group, tensor.device)
    found[id(tensor)] = Target((name,), tensor, spec, layout, device)


def _works_on_sharded(module: nn.Module, name: str, flows: Mapping[str, StatedFlows]) -> bool:
    """Return whether a tensor's module is of unknown kind and gets sharded values: then it works on ShardedTensors."""
    path = name.rpartition(".")[0]
    stated = flows.get(unwrapped(path))
    if stated is None or layer_class(type(module.get_submodule(path))) is not None:
        return False
    return any(cuts(flow.after) for flow in stated.ins.values())


def _where_only(module: nn.Module, targets: tuple[Target, ...], flows: Mapping[str, StatedFlows]) -> tuple[str, ...]:
    """Return layers without flows that exist on some ranks only, with plain values; other ranks do not call them."""
    found: dict[str, None] = {}
    for target in targets:
        if isinstance(target.spec, Spec) and target.spec.only_part is not None:
            for name in target.names:
                path = name.rpartition(".")[0]
                stated = flows.get(unwrapped(path), StatedFlows())
                if not (stated.ins or stated.outs) and layer_class(type(module.get_submodule(path))) is not None:
                    found[unwrapped(path)] = None
    return tuple(found)
