"""Rules of a part of a model as a `Resolved`, so that their flows are checked as those of a whole plan are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from torch import nn

from shardtensor.comm.group import Group
from shardtensor.errors import PlanError
from shardtensor.layout.layout import replicated
from shardtensor.mesh import Mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.folding import folded
from shardtensor.plan.findings.report import text_report
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.flows.gradients import Flows, flows_of
from shardtensor.plan.match.patterns import unwrapped
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Passing, Placed, Resolved
from shardtensor.sharding.model_info import model_info
from shardtensor.sharding.passings import Passings
from shardtensor.sharding.work import Target
from shardtensor.spec.nodes import Replicate, Spec
from shardtensor.tensor.sharded_tensor import ShardedTensor


def checked_flows(module: nn.Module, group: Group, targets: Sequence[Target], passings: Passings) -> Flows:
    """Work out how values pass a module.

    Args:
        targets: the tensors of which rules speak; others are whole, or lie as they did before.
        passings: what rules say of modules.

    Raises:
        PlanError: flows contradict tensors or one another, or a value would reach a module that does not expect it.
    """
    flows = flows_of(_resolved(module, group, targets, passings), is_whole=False)
    errors = [finding for finding in flows.findings() if finding.severity == "error"]
    if errors:
        raise PlanError(text_report(folded(errors)))
    return flows


def _resolved(module: nn.Module, group: Group, targets: Sequence[Target], passings: Passings) -> Resolved:
    mesh = group.mesh or Mesh(((_the_axis(targets, passings), group.size),), group.ranks)
    for flow in _flows(passings.values()):
        mesh.refuse_unknown(_names(flow), PlanError)
    model = model_info(module)
    known = {id(target.tensor): target for target in targets if target.layout is not None}
    placed: dict[str, Placed] = {}
    for name, tensor in _tensors(module):
        info, target = model.by_name.get(name), known.get(id(tensor))
        if info is None:
            continue
        if target is not None and target.layout is not None:  # under whatever name it was sharded: it may be tied
            placed[name] = Placed(info, target.spec, target.layout)
        elif isinstance(tensor, ShardedTensor):  # it was sharded before
            placed[name] = Placed(info, tensor.sharding_spec(), tensor._layout)
        else:
            placed[name] = Placed(info, Replicate(), replicated(info.shape, mesh.ranks, mesh.sizes))
    return Resolved(Plan(Axes(mesh)), model, placed, _under_all_names(module, passings))


def _tensors(module: nn.Module) -> Iterable[tuple[str, object]]:
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            yield unwrapped(name), tensor


def _under_all_names(module: nn.Module, passings: Passings) -> Mapping[str, Passing]:
    """What is said of modules, their flows under each name of theirs."""
    names: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        names.setdefault(id(part), []).append(unwrapped(path))
    found = {unwrapped(path): passing for path, passing in passings.items()}
    for path, passing in passings.items():
        for name in names[id(module.get_submodule(path))]:
            found.setdefault(name, attrs.evolve(passing, uses=(), locals={}))
    return found


def _flows(passings: Iterable[Passing]) -> Iterable[Flow]:
    for passing in passings:
        for flow, _ in (*passing.ins.values(), *passing.outs.values()):
            yield flow


def _names(flow: Flow) -> list[str]:
    """The axes that a flow speaks of."""
    return sorted({*flow.before.axis_names, *flow.after.axis_names, *flow.addends})


def _the_axis(targets: Sequence[Target], passings: Passings) -> str:
    """What the rules call the one axis of a group that has no mesh."""
    names = {axis for flow in _flows(passings.values()) for axis in _names(flow)}
    names |= {axis for target in targets if isinstance(target.spec, Spec) for axis in target.spec.axis_names}
    if len(names) > 1:
        raise PlanError(
            "the ranks have one axis, and the plan has several names for it",
            {"names": ", ".join(sorted(names))},
            ["use one name", "pass a DeviceMesh with these axes as process_group"],
        )
    return names.pop() if names else "*"
