"""From rules in Python and a module to what is done to which tensor; every fault is found here, nothing is changed.

For torch's own plans and for dicts of rules, which leave tensors without a rule as they are; see `from_plan` for plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, MissingParameterError, PlanError, RuleError, SpecError
from shardtensor.parallel.parameter import bound, find, shards_itself
from shardtensor.plan.blocks import lines
from shardtensor.plan.line import Line
from shardtensor.plan.match.patterns import is_below, matches, nearest, unwrapped
from shardtensor.plan.resolved import Passing
from shardtensor.sharding.part_of_model import checked_flows
from shardtensor.sharding.passings import counts_of, hooks_of
from shardtensor.sharding.plan import Sharder, ShardingPlan
from shardtensor.sharding.work import Target, Work
from shardtensor.spec.nodes import ShardingSpec
from shardtensor.spec.parse import as_spec
from shardtensor.tensor.placing import device_for


def resolve(module: nn.Module, plan: ShardingPlan, group: Group, src_rank: int, has_flows: bool = True) -> Work:
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
    passings = _passings(plan_lines, module, modules)
    targets = tuple(_targets(module, rules, group, src_rank))
    outputs = [
        (path, _spec(value, f"Only `ShardingSpec` is supported as output_plan for `{pattern}`"))
        for pattern, value in (plan.output_plan or {}).items()
        for path in _modules_for(pattern, None, module, modules)
    ]
    locals_ = [p for pattern in plan.return_local_tensor or () for p in _modules_for(pattern, None, module, modules)]
    return Work(
        module,
        group,
        targets,
        checked_flows(module, group, targets, passings) if passings else None,
        counts_of(module, passings, group),
        hooks_of(passings),
        sharders=tuple(sharders.items()),
        outputs=tuple(outputs),
        local_outputs=tuple(locals_),
    )


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


def _passings(plan_lines: list[Line], module: nn.Module, modules: dict[str, str]) -> dict[str, Passing]:
    """What lines say of each module."""
    found: dict[str, dict[str, Any]] = {}
    for line in plan_lines:
        if line.kind == "tensor":
            continue
        for path in _modules_for(line.pattern, None, module, modules, line.is_optional):
            is_flow = line.kind in ("in", "out")
            if is_flow and line.kind in dict(module.get_submodule(path).named_children()):
                raise PlanError(
                    f"`{line.kind}` is the flow of a value, and {path or 'the module'} has a submodule of that name",
                    {"flow": str(line.value)},
                    f"write `{{{line.kind}}}` for the submodule",
                )
            said = found.setdefault(path, {"in": {}, "out": {}, "local": {}, "use": []})
            if line.kind == "use":
                said["use"].append((line.value, line))
                continue
            known = said[line.kind].get(line.name)
            if known is not None and known[0] != line.value:
                raise PlanError(
                    f"two rules say how values pass `{path or 'the module'}`"
                    if is_flow
                    else f"two rules share out `{line.name}` of `{path or 'the module'}`",
                    {f"{line.kind} {line.name}".strip(): f"{known[0]}, and {line.value}"},
                    "narrow one of the patterns",
                )
            if known is None:
                said[line.kind][line.name] = line.value, line
    return {path: Passing(said["in"], said["out"], tuple(said["use"]), said["local"]) for path, said in found.items()}


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
            layout = None if shards_itself(spec) else bound(spec, tensor, group, names, src_rank)
            if known is None:
                device = tensor.device if layout is None else device_for(spec, group, tensor.device)
                found[id(tensor)] = Target((name,), tensor, spec, layout, device)
                continue
        except (LayoutError, SpecError, RuleError) as error:
            fault, *facts = str(error).splitlines()
            kind = LayoutError if isinstance(error, SpecError) else type(error)
            raise kind("\n".join([f"{name}: {fault}", *facts, f"  rule  {pattern}: {spec}"])) from None
        # an embedding's "vocab" is a head's "out": specs may differ where layouts do not
        if known.spec != spec and (layout is None or layout != known.layout):
            raise PlanError(
                f"two rules shard `{known.names[0]}`, which is also `{name}`",
                {known.names[0]: known.spec, pattern: spec},
                f"give both the same cut, or drop the one of `{name}`: it is the same tensor",
            )
        found[id(tensor)] = attrs.evolve(known, names=(*known.names, name))
    return found.values()
