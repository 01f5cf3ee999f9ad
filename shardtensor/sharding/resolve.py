"""From a plan and a module to what is done to which tensor; every fault is found here, and nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, MissingParameterError, PlanError, RuleError, SpecError
from shardtensor.layout.layout import Layout
from shardtensor.parallel.parameter import bound, find, shards_itself
from shardtensor.plan.blocks import lines
from shardtensor.plan.flow import Flow
from shardtensor.plan.line import Line
from shardtensor.plan.patterns import is_below, matches, nearest, unwrapped
from shardtensor.sharding.flows import Binder, Stated, Tensors
from shardtensor.sharding.plan import Sharder, ShardingPlan
from shardtensor.sharding.settle import Settled, settle
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.placing import device_for
from shardtensor.tensor.sharded_tensor import ShardedTensor


@attrs.frozen(eq=False)
class Target:
    """One tensor, under one name or several, and how it is to lie; no layout where its spec shards it itself."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    spec: ShardingSpec
    layout: Layout | None
    device: torch.device

    def __str__(self) -> str:
        tensor = self.tensor
        frozen = "" if tensor.requires_grad else ", frozen"
        without_memory = " on meta" if tensor.is_meta else ""
        return f"{self.spec} of {tuple(tensor.shape)} {tensor.dtype}{without_memory}{frozen}"


@attrs.frozen(eq=False)
class Resolved:
    """What a plan comes to for one module, in the order of its rules."""

    targets: tuple[Target, ...]
    flows: Mapping[str, Stated]
    sharders: tuple[tuple[str, Sharder], ...]
    outputs: tuple[tuple[str, ShardingSpec], ...]
    locals: tuple[str, ...]

    def facts(self) -> dict[str, str]:
        """What all ranks must have alike, as text."""
        found = {", ".join(target.names): str(target) for target in self.targets}
        found |= {path: type(sharder).__qualname__ for path, sharder in self.sharders}
        for path, flows in self.flows.items():
            found |= {f"in {name or ''} of {path or 'the module'}": str(flow) for name, flow in flows.ins.items()}
            found |= {f"out of {path or 'the module'}": str(flows.out)} if flows.out is not None else {}
        found |= {f"output of {path or 'the module'}": str(spec) for path, spec in self.outputs}
        return found | {f"local output of {path or 'the module'}": "yes" for path in self.locals}

    def settled(self, module: nn.Module, binder: Binder) -> list[Settled]:
        """What each module with a flow does."""
        targets = {id(target.tensor): target for target in self.targets if target.layout is not None}
        axis = self._the_axis() if binder.group.mesh is None and self.flows else "*"
        tensors = {}
        for path in self.flows:
            specs: dict[str, ShardingSpec] = {}
            layouts: dict[str, Layout] = {}
            for name, tensor in module.get_submodule(path).named_parameters(recurse=False):
                target = targets.get(id(tensor))  # under whatever name the plan sharded it: it may be tied
                if target is not None and target.layout is not None:
                    specs[name], layouts[name] = target.spec, target.layout
                elif isinstance(tensor, ShardedTensor):  # it was sharded before
                    specs[name], layouts[name] = tensor.sharding_spec(), tensor._layout
            tensors[path] = Tensors(specs, layouts, binder.group.mesh, axis)
        return settle(module, self.flows, tensors, binder)

    def _the_axis(self) -> str:
        """What the plan calls the one axis of a group that has no mesh."""
        flows = [flow for stated in self.flows.values() for flow in (*stated.ins.values(), stated.out) if flow]
        names = {axis for flow in flows for side in (flow.before, flow.after) for axis in side.axis_names}
        names |= {axis for target in self.targets if isinstance(target.spec, Spec) for axis in target.spec.axis_names}
        if len(names) > 1:
            raise PlanError(
                "the ranks have one axis, and the plan has several names for it",
                {"names": ", ".join(sorted(names))},
                ["use one name", "pass a DeviceMesh with these axes as process_group"],
            )
        return names.pop() if names else "*"


def resolve(module: nn.Module, plan: ShardingPlan, group: Group, src_rank: int, has_flows: bool = True) -> Resolved:
    """Find what every rule of a plan stands for. Pure: reads the module, changes nothing, sends nothing.

    Args:
        has_flows: `in` and `out` stand for flows, which torch's own plans do not know.

    Raises:
        PlanError: an entry is no spec, rules contradict each other, a module has no place.
        MissingParameterError: a pattern matches nothing.
        LayoutError, SpecError, RuleError: a spec does not fit its tensor; names the tensor.
    """
    modules = {unwrapped(name): name for name, _ in module.named_modules(remove_duplicate=False)}
    tensors = {unwrapped(name): name for name in _tensor_names(module)}
    plan_lines = (
        list(lines(plan.plan)) if has_flows else [Line(pattern, value=value) for pattern, value in plan.plan.items()]
    )
    sharders = {
        path: line.value
        for line in plan_lines
        if isinstance(line.value, Sharder)
        for path in _modules_for(line.pattern, line.value, module, modules)
    }
    rules: dict[str, tuple[str, ShardingSpec]] = {}
    for line in plan_lines:
        if isinstance(line.value, Sharder) or line.kind != "tensor":
            continue
        spec = _spec(line.value, f"Only `ShardingSpec` and `Sharder` are supported to shard `{line.pattern}`")
        for name in _tensors_for(line.pattern, module, tensors, line.is_optional):
            _refuse_two(name, line.pattern, spec, rules.get(name), sharders)
            rules[name] = line.pattern, spec
    flows = _flows(plan_lines, module, modules)
    targets = _targets(module, rules, group, src_rank)
    outputs = [
        (path, _spec(value, f"Only `ShardingSpec` is supported as output_plan for `{pattern}`"))
        for pattern, value in (plan.output_plan or {}).items()
        for path in _modules_for(pattern, None, module, modules)
    ]
    locals_ = [p for pattern in plan.return_local_tensor or () for p in _modules_for(pattern, None, module, modules)]
    return Resolved(tuple(targets), flows, tuple(sharders.items()), tuple(outputs), tuple(locals_))


def _tensor_names(module: nn.Module) -> Iterable[str]:
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in module.named_buffers(remove_duplicate=False))


def _spec(value: Any, fault: str) -> ShardingSpec:
    if isinstance(value, str):
        return as_spec(value)
    try:
        return as_spec(value)
    except SpecError:
        raise PlanError(fault, {"found": type(value).__name__}, 'write a spec, such as "[tp, -]"') from None


def _flows(plan_lines: list[Line], module: nn.Module, modules: dict[str, str]) -> dict[str, Stated]:
    """The flows of each module that has some."""
    ins: dict[str, dict[str | None, Flow]] = {}
    outs: dict[str, Flow] = {}
    for line in plan_lines:
        if line.kind == "tensor":
            continue
        for path in _modules_for(line.pattern, None, module, modules, line.is_optional):
            if line.kind in dict(module.get_submodule(path).named_children()):
                raise PlanError(
                    f"`{line.kind}` is the flow of a value, and {path or 'the module'} has a submodule of that name",
                    {"flow": str(line.value)},
                    f"write `{{{line.kind}}}` for the submodule",
                )
            known = outs.get(path) if line.kind == "out" else ins.get(path, {}).get(line.name or None)
            if known is not None and known != line.value:
                raise PlanError(
                    f"two rules say how values pass `{path or 'the module'}`",
                    {f"{line.kind} {line.name}".strip(): f"{known}, and {line.value}"},
                    "narrow one of the patterns",
                )
            if line.kind == "out":
                outs[path] = line.value
            else:
                ins.setdefault(path, {})[line.name or None] = line.value
    return {path: Stated(ins.get(path, {}), outs.get(path)) for path in dict.fromkeys((*ins, *outs))}


def _tensors_for(pattern: str, module: nn.Module, tensors: dict[str, str], is_optional: bool = False) -> list[str]:
    """The names of the tensors that a pattern stands for, itself or by a module above them."""
    found = [name for clean, name in tensors.items() if matches(pattern, clean) or is_below(pattern, clean)]
    if found or is_optional:
        return found
    try:
        find(module, pattern)  # a tensor that is a plain attribute
    except MissingParameterError:
        raise MissingParameterError(
            f"{type(module).__name__} has no attribute `{pattern}`: the rule matches no parameter and no buffer",
            {"nearest": nearest(pattern, tensors)},
            "name a parameter or a module, or write a pattern: `layers.*.weight`, `**.bias`",
        ) from None
    return [pattern]


def _modules_for(
    pattern: str, sharder: Sharder | None, module: nn.Module, modules: dict[str, str], is_optional: bool = False
) -> list[str]:
    if sharder is not None and not pattern:
        raise PlanError(
            "path must not be empty for custom sharder!",
            {"found": type(sharder).__name__},
            "call its shard(module) yourself: the root has no parent to hold the result",
        )
    found = [name for clean, name in modules.items() if (matches(pattern, clean) if pattern else not clean)]
    if not found and not is_optional:
        raise MissingParameterError(
            f"{type(module).__name__} has no attribute `{pattern}`: the pattern matches no submodule",
            {"nearest": nearest(pattern, filter(None, modules))},
            "name a submodule",
        )
    return found


def _refuse_two(
    name: str, pattern: str, spec: ShardingSpec, other: tuple[str, ShardingSpec] | None, sharders: dict[str, Sharder]
) -> None:
    inside = next((path for path in sharders if f"{name}.".startswith(f"{path}.")), None)
    if inside is not None:
        raise PlanError(
            f"the rule `{pattern}` should not conflict with the submodule tree of a sharder",
            {"tensor": name, "sharder": f"{type(sharders[inside]).__name__} of `{inside}`"},
            "let the sharder shard what lies below it",
        )
    if other is not None and other[1] != spec:
        raise PlanError(
            f"two rules shard `{name}`",
            {other[0]: other[1], pattern: spec},
            "narrow one of the patterns",
        )


def _targets(
    module: nn.Module, rules: dict[str, tuple[str, ShardingSpec]], group: Group, src_rank: int
) -> Iterable[Target]:
    found: dict[int, Target] = {}
    for name, (pattern, spec) in rules.items():
        try:
            names, tensor = find(module, name)
            known = found.get(id(tensor))
            if known is None:
                layout = None if shards_itself(spec) else bound(spec, tensor, group, names, src_rank)
                device = tensor.device if layout is None else device_for(spec, group, tensor.device)
                found[id(tensor)] = Target((name,), tensor, spec, layout, device)
                continue
        except (LayoutError, SpecError, RuleError) as error:
            fault, *facts = str(error).splitlines()
            kind = LayoutError if isinstance(error, SpecError) else type(error)
            raise kind("\n".join([f"{name}: {fault}", *facts, f"  rule  {pattern}: {spec}"])) from None
        _refuse_two(f"{known.names[0]}, which is also {name}", pattern, spec, (known.names[0], known.spec), {})
        found[id(tensor)] = attrs.evolve(known, names=(*known.names, name))
    return found.values()
