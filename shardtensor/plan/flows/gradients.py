"""The flows of a plan: what each known layer does with values and gradients, and what would go wrong silently.

A missing or doubled reduction raises nothing: the loss falls, a little slower. Here it is an error of the plan's text.
What raises by itself at the first call, as parts do that reach the wrong module, is not looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.expert_flows import expert_findings
from shardtensor.plan.flows.flow import as_written, cut_axes, partial_axes
from shardtensor.plan.flows.fused_flows import fused_findings
from shardtensor.plan.flows.layer_flows import Contradiction, LayerWork, layer_work, steps
from shardtensor.plan.flows.modules import Layer, Modules, flow_finding
from shardtensor.plan.flows.sums import Sums
from shardtensor.plan.flows.takers import Takers
from shardtensor.plan.resolved import Resolved


@attrs.frozen(eq=False)
class Flows:
    """The flows of a plan, worked out.

    Attributes:
        modules: the plan, module by module.
        works: what each known layer does that has a flow; those that contradict themselves are missing.
        contradictions: of those.
        is_whole: see `flows_of`.
    """

    modules: Modules
    works: Mapping[str, LayerWork]
    contradictions: Mapping[str, Contradiction]
    is_whole: bool = True

    @cached_property
    def meetings(self) -> Sums:
        """Which layers each `in` serves, and what it sums."""
        return Sums(self.modules, self.contradictions)

    @cached_property
    def takers(self) -> Takers:
        """Which parts of values modules leave, and which they take."""
        return Takers(self.modules, self.works, frozenset(self.contradictions), self.is_whole)

    def findings(self) -> Iterator[Finding]:
        """E401 to E404, and E206 for blocks that are cut as one."""
        for path, contradiction in self.contradictions.items():
            yield _finding(self.modules.layers[path], contradiction)
        yield from _containers(self.modules, self.meetings)
        to_hooks = {*self.takers.to_hooks, *self.takers.logits}
        yield from self.meetings.findings(to_hooks, self.is_whole)
        yield from self.takers.findings()
        yield from expert_findings(self.modules, self.is_whole)
        yield from fused_findings(self.modules)


def flows_of(resolved: Resolved, *, is_whole: bool = True) -> Flows:
    """Work out the flows of a plan. Pure, and linear in the number of modules.

    Args:
        is_whole: the plan has rules for the whole model. Rules for a part of one leave the rest as it is: plain modules
            on whole values. There it is no fault that no module leaves the addends which another sums, that a sibling
            has no flow, or that the axes of the data are not known.
    """
    modules = Modules(resolved)
    works: dict[str, LayerWork] = {}
    contradictions: dict[str, Contradiction] = {}
    for path, layer in modules.layers.items():
        if not layer.has_flow:
            continue
        try:
            works[path] = layer_work(layer, modules.nearest_in(path) is not None)
        except Contradiction as found:
            contradictions[path] = found
    return Flows(modules, works, contradictions, is_whole)


def check_flows(resolved: Resolved) -> tuple[Finding, ...]:
    """Find what is wrong with how values and gradients pass the modules of a plan: E401, E402, E403, E404, and E206 for
    blocks that are cut as one.

    Pure: no torch, no processes. Known layers (linear, embedding, norm) are worked out; of other modules it is believed
    what the plan says.

    Args:
        resolved: with every tensor placed; what could not be placed is passed over.

    Returns:
        a finding for each module concerned, at the line of the plan that is at fault.
    """
    return tuple(flows_of(resolved).findings())


def _finding(layer: Layer, found: Contradiction) -> Finding:
    side, _, name = found.side.partition(" ")
    line = layer.stated.line(side, name) if side in ("in", "out") else None
    if line is None:
        placed = layer.params.get(side) or layer.params["weight"]
        line = placed.line or next((placed.line for placed in layer.params.values() if placed.line), None)
    what = "flow" if side in ("in", "out") else "layout"
    return flow_finding(found.code, found.fault, line, found.why, found.fix, layer.path, what)


def _works_on_shards(path: str, modules: Modules) -> bool:
    """Whether a module that is no known layer gets ShardedTensors; with a hook it may work on slices of its own."""
    is_cut = any(not placed.layout.is_replicated for placed in modules.owned.get(path, {}).values())
    return is_cut and not modules.stated[path].passing.uses


def _containers(modules: Modules, meetings: Sums) -> list[Finding]:
    """Flows of modules that are no known layers and have no way from their left to their right."""
    findings = []
    for path, stated in modules.stated.items():
        if path in modules.layers:
            continue
        sides = [("in", name, flow, meetings.addends.get(path, ())) for name, flow in stated.ins.items()]
        sides += [("out", name, flow, ()) for name, flow in stated.outs.items()]
        for side, name, flow, addends in sides:
            line = stated.line(side, name)
            try:
                if side == "out" and partial_axes(flow.after) and _works_on_shards(path, modules):
                    named = modules.named(partial_axes(flow.after))
                    raise Contradiction(
                        "E402", side, f"this module leaves no addends along {named}",
                        "its class is not known and its parameters are cut, so it works on ShardedTensors, which are "
                        "summed at once",
                        f"write `out: {as_written(stated.passing.outs[name][0].before)} -> replicate`",
                    )  # fmt: skip
                steps(flow, side, addends)
                twice = modules.named([axis for axis in flow.addends if axis in cut_axes(flow.after)])
                if twice:
                    raise Contradiction(
                        "E401", side, f"the gradient along {twice} is declared an addend, and is none",
                        f"the value is cut along {twice}: so is its gradient", f"leave {twice} out of `grad`",
                    )  # fmt: skip
            except Contradiction as found:
                findings.append(flow_finding(found.code, found.fault, line, found.why, found.fix, path))
    return findings
