"""Read rules of a part of a module, a dict or torch's `ShardingPlan`, as a `Plan` that leaves the rest as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import MissingParameterError, PlanError, SpecError
from shardtensor.layout.layout import Layout, replicated
from shardtensor.mesh import Mesh
from shardtensor.parallel.model_info import model_info, own_paths
from shardtensor.parallel.parameter import find
from shardtensor.parallel.sharding_plan import Sharder, ShardingPlan
from shardtensor.plan.axes import Axes
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.line import Line
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.match.patterns import nearest, unwrapped
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.plan.python_rules import lines
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.nodes import Replicate, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.placing import mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen
class Opaque:
    """A spec that names devices, or of a user's own class: code with torch binds it, not the plan."""

    spec: ShardingSpec

    def __str__(self) -> str:
        return str(self.spec)


@attrs.frozen(eq=False)
class Rules:
    """A plan of a module, or rules of a part of it, read.

    Attributes:
        plan: its lines, for the axes of the group; an `Opaque` where a spec cannot be bound without torch.
        model: the module's tensors, also those in rules that are neither parameters nor buffers.
        opaque: from the name of a tensor to its spec.
        sharders, outputs, local_outputs: by the paths of modules.
    """

    plan: Plan
    model: Model
    opaque: Mapping[str, ShardingSpec] = attrs.field(factory=dict)
    sharders: tuple[tuple[str, Sharder], ...] = ()
    outputs: tuple[tuple[str, ShardingSpec], ...] = ()
    local_outputs: tuple[str, ...] = ()


def read_rules(module: nn.Module, rules: ShardingPlan | Mapping[str, Any], group: Group) -> Rules:
    """Read rules for a module and a group. Pure: reads the module, changes nothing, sends nothing."""
    if isinstance(rules, ShardingPlan):
        torch_plan, found = rules, [Line(text, value=value) for text, value in rules.plan.items()]
    else:
        torch_plan, found = ShardingPlan({}), list(lines(rules))
    entries = [line if line.kind != "tensor" else attrs.evolve(line, value=_value(line)) for line in found]
    model = _with_attributes(module, model_info(module, all_buffers=True), entries)
    tree = NameTree(model.by_name, model.paths)
    sharders = {
        path: line.value
        for line in entries
        if isinstance(line.value, Sharder)
        for path in _modules(module, model, tree, line.pattern, line.value)
    }
    kept = [line for line in entries if not isinstance(line.value, Sharder)]
    for line in kept:
        _refuse(module, model, tree, line, sharders)
    opaque = {name: x.value.spec for x in kept if isinstance(x.value, Opaque) for name in tree.tensors(x.pattern)}
    names = own_paths(module)
    fault = "Only `ShardingSpec` is supported as output_plan for `{}`"
    return Rules(
        Plan(Axes(_mesh(group, kept)), tuple(kept), is_part=True),
        model,
        opaque,
        tuple((names[path], sharder) for path, sharder in sharders.items()),
        tuple(
            (names[path], _spec(value, fault.format(pattern)))
            for pattern, value in (torch_plan.output_plan or {}).items()
            for path in _modules(module, model, tree, pattern)
        ),
        tuple(names[path] for p in torch_plan.return_local_tensor or () for path in _modules(module, model, tree, p)),
    )


def _value(line: Line) -> Spec | Opaque | Sharder:
    """Return the value of a rule for tensors."""
    if isinstance(line.value, Sharder):
        return line.value
    spec = _spec(line.value, f"Only `ShardingSpec` and `Sharder` are supported to shard `{line.pattern}`")
    return spec if isinstance(spec, Spec) else Opaque(spec)


def _spec(value: Any, fault: str) -> ShardingSpec:
    if isinstance(value, str):
        return as_spec(value)
    try:
        return as_spec(value)
    except SpecError:
        raise PlanError(fault, {"found": type(value).__name__}, 'write a spec, such as "[tp, -]"') from None


def _with_attributes(module: nn.Module, model: Model, entries: Iterable[Line]) -> Model:
    """Return the model with the plain tensors that rules name added."""
    tree, more = NameTree(model.by_name, model.paths), []
    for line in entries:
        is_rule = line.kind == "tensor" and not line.is_optional and not isinstance(line.value, Sharder)
        if is_rule and not tree.tensors(line.pattern):
            with suppress(MissingParameterError):
                held = find(module, line.pattern)[1]
                dtype = str(held.dtype).removeprefix("torch.")
                more.append(TensorInfo(line.pattern, tuple(held.shape), None, dtype, is_buffer=True))
    return attrs.evolve(model, tensors=(*model.tensors, *more)) if more else model


def _modules(
    module: nn.Module, model: Model, tree: NameTree, pattern: str, sharder: Sharder | None = None
) -> tuple[str, ...]:
    """Return the paths of the modules that a pattern matches."""
    if sharder is not None and not pattern:
        raise PlanError(
            "path must not be empty for custom sharder!",
            {"found": type(sharder).__name__},
            "call its shard(module) yourself: the root has no parent to hold the result",
        )
    found = tree.modules(pattern)
    if not found:
        raise MissingParameterError(
            f"{type(module).__name__} has no attribute `{pattern}`: the pattern matches no submodule",
            {"nearest": nearest(pattern, filter(None, model.paths))},
            "name a submodule",
        )
    return found


def _refuse(module: nn.Module, model: Model, tree: NameTree, line: Line, sharders: Mapping[str, Sharder]) -> None:
    """Raise if a rule matches nothing, or matches what something else decides."""
    if line.kind != "tensor":
        found = tree.modules(line.pattern) if line.is_optional else _modules(module, model, tree, line.pattern)
        for path in found if line.kind in ("in", "out") else ():
            if tree.modules(f"{path}.{{{line.kind}}}".strip(".")):
                raise PlanError(
                    f"`{line.kind}` is the flow of a value, and {path or 'the module'} has a submodule of that name",
                    {"flow": str(line.value)},
                    f"write `{{{line.kind}}}` for the submodule",
                )
        return
    names = tree.tensors(line.pattern)
    if not names and not line.is_optional:
        raise MissingParameterError(
            f"{type(module).__name__} has no attribute `{line.pattern}`: the rule matches no parameter and no buffer",
            {"nearest": nearest(line.pattern, model.by_name)},
            "name a parameter or a module, or write a pattern: `layers.*.weight`, `**.bias`",
        )
    for name in names:
        inside = next((path for path in sharders if name.startswith(f"{path}.")), None)
        if inside is not None:
            raise PlanError(
                f"the rule `{line.pattern}` should not conflict with the submodule tree of a sharder",
                {"tensor": name, "sharder": f"{type(sharders[inside]).__name__} of `{inside}`"},
                "let the sharder shard what lies below it",
            )


def _mesh(group: Group, entries: Sequence[Line]) -> Mesh:
    """Return the mesh of a group; if it has none and rules have flows, one axis with the name in the rules."""
    flows = axes_of_flows(entries)
    if group.mesh is not None or not flows:
        return mesh_of(group)
    names = flows | {axis for line in entries if isinstance(line.value, Spec) for axis in line.value.axis_names}
    if len(names) > 1:
        raise PlanError(
            "the ranks have one axis, and the plan has several names for it",
            {"names": ", ".join(sorted(names))},
            ["use one name", "pass a DeviceMesh with these axes as process_group"],
        )
    return Mesh(((names.pop(), group.size),), group.ranks)


def axes_of_flows(entries: Iterable[Line]) -> set[str]:
    """Return the axes that flows name."""
    flows = [line.value for line in entries if isinstance(line.value, Flow)]
    return {axis for x in flows for axis in (*x.before.axis_names, *x.after.axis_names, *x.partials)}


def with_the_rest(module: nn.Module, resolved: Resolved, targets: Sequence[Any]) -> Resolved:
    """Return resolved rules with the tensors that no rule names added: replicated, or in their current layout."""
    mesh = resolved.plan.axes.mesh
    sharded = {id(target.tensor): target for target in targets if target.layout is not None}
    placed: dict[str, Placed] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        info = resolved.model.by_name[unwrapped(name)]
        spec: ShardingSpec = Replicate()
        layout: Layout = replicated(info.shape, mesh.ranks, mesh.sizes)
        if id(tensor) in sharded:  # under any name, because it may be tied
            spec, layout = sharded[id(tensor)].spec, sharded[id(tensor)].layout
        elif isinstance(tensor, ShardedTensor):
            spec, layout = tensor.sharding_spec(), tensor._layout
        placed[info.name] = Placed(info, spec, layout)
    names: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        names.setdefault(id(part), []).append(unwrapped(path))
    modules = dict(resolved.modules)
    for path, module_flows in resolved.modules.items():  # flows apply under each name of a module
        for name in names[id(module.get_submodule(path))]:
            modules.setdefault(name, attrs.evolve(module_flows, uses=(), locals={}))
    return attrs.evolve(resolved, tensors=placed, modules=modules)
