"""Check the flows of a plan: what each known layer does with values and gradients, and which errors would be silent.

A missing or doubled reduction raises nothing: the loss falls, a little slower. Here it is an error of the plan's text.
Errors that torch raises at the first call, such as a shard that reaches the wrong module, are not checked. Experts of
``use dispatch(ep)`` have their own findings (E401 to E403). Consecutive blocks that are sharded as one dim, such as a
fused q, k and v, are E206: the model's code splits them by their lengths, so each rank needs a shard of every block,
unless that code gets the full value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import attrs

from shardtensor.layout.layout import MeshLayout
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import Flow, FlowError, as_written, cut_axes, flow_route, partial_axes
from shardtensor.plan.flows.layer_flows import LayerWork, layer_work
from shardtensor.plan.flows.modules import Layer, Modules, Names, StatedFlows, flow_finding, is_inside
from shardtensor.plan.flows.sums import Sums
from shardtensor.plan.flows.takers import Takers
from shardtensor.plan.line import Line, origin_of
from shardtensor.plan.match.layout_errors import shape_text
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.nodes import Cut, Spec


@attrs.frozen(eq=False)
class Flows:
    """The flows of a plan and their steps.

    Attributes:
        modules: the plan, module by module.
        works: the work of each known layer that has a flow; those that contradict themselves are missing.
        contradictions: of those layers.
        is_whole: see `flows_of`.
    """

    modules: Modules
    works: Mapping[str, LayerWork]
    contradictions: Mapping[str, FlowError]
    is_whole: bool = True

    @cached_property
    def sums(self) -> Sums:
        """The layers that each `in` serves, and the axes that it sums along."""
        return Sums(self.modules, self.contradictions)

    @cached_property
    def takers(self) -> Takers:
        """The sharded and partial values that modules return, and those that they accept."""
        return Takers(self.modules, self.works, frozenset(self.contradictions), self.is_whole)

    def findings(self) -> Iterator[Finding]:
        """Yield E401 to E404, and E206 for blocks that are sharded as one."""
        for path, contradiction in self.contradictions.items():
            yield _finding(self.modules.layers[path], contradiction)
        yield from _containers(self.modules, self.sums)
        to_hooks = {*self.takers.to_hooks, *self.takers.logits}
        yield from self.sums.findings(to_hooks, self.is_whole)
        yield from self.takers.findings()
        yield from expert_findings(self.modules, self.is_whole)
        yield from fused_findings(self.modules)


def flows_of(resolved: Resolved, *, is_whole: bool = True) -> Flows:
    """Return the flows of a plan. Pure, and linear in the number of modules.

    Args:
        is_whole: the plan has rules for the whole model. With rules for a part of it, the other modules stay plain and
            work on full values. Then it is no fault if no module returns the partial sums that another sums, if a
            sibling has no flow, or if the data axes are not known.
    """
    modules = Modules(resolved)
    works: dict[str, LayerWork] = {}
    contradictions: dict[str, FlowError] = {}
    for path, layer in modules.layers.items():
        if not layer.has_flow:
            continue
        try:
            works[path] = layer_work(layer, modules.nearest_in(path) is not None)
        except FlowError as found:
            contradictions[path] = found
    return Flows(modules, works, contradictions, is_whole)


def check_flows(resolved: Resolved) -> tuple[Finding, ...]:
    """Check how values and gradients pass the modules of a plan: E401, E402, E403, E404, and E206 for blocks that are
    sharded as one.

    Pure: no torch, no processes. Known layers (linear, embedding, norm) are computed; for other modules the flows
    of the plan are taken as right.

    Args:
        resolved: with every tensor placed; others are skipped.

    Returns:
        a finding for each module concerned, at the wrong line of the plan.
    """
    return tuple(flows_of(resolved).findings())


def _finding(layer: Layer, found: FlowError) -> Finding:
    side, _, name = found.side.partition(" ")
    line = layer.stated.line(side, name) if side in ("in", "out") else None
    if line is None:
        placed = layer.params.get(side) or layer.params["weight"]
        line = placed.line or next((placed.line for placed in layer.params.values() if placed.line), None)
    what = "flow" if side in ("in", "out") else "layout"
    return flow_finding(found.code, found.fault, line, found.why, found.fix, layer.path, what)


def _works_on_shards(path: str, modules: Modules) -> bool:
    """Whether a module that is no known layer works on ShardedTensors; with a hook it may work on its own slices."""
    is_cut = any(not placed.layout.is_replicated for placed in modules.owned.get(path, {}).values())
    return is_cut and not modules.stated[path].module_flows.uses


def _containers(modules: Modules, sums: Sums) -> list[Finding]:
    """Return findings for flows of unknown modules whose left layout cannot become the right one."""
    findings = []
    for path, stated in modules.stated.items():
        if path in modules.layers:
            continue
        sides = [("in", name, flow, sums.partials.get(path, ())) for name, flow in stated.ins.items()]
        sides += [("out", name, flow, ()) for name, flow in stated.outs.items()]
        for side, name, flow, partials in sides:
            line = stated.line(side, name)
            try:
                if side == "out" and partial_axes(flow.after) and _works_on_shards(path, modules):
                    named = modules.named(partial_axes(flow.after))
                    raise FlowError(
                        "E402", side, f"this module leaves no partial sums along {named}",
                        "its class is not known and its parameters are cut, so it works on ShardedTensors, which are "
                        "summed at once",
                        f"write `out: {as_written(stated.module_flows.outs[name][0].before)} -> replicate`",
                    )  # fmt: skip
                flow_route(flow, partials, side)
                twice = modules.named([axis for axis in flow.partials if axis in cut_axes(flow.after)])
                if twice:
                    raise FlowError(
                        "E401", side, f"the gradient along {twice} is declared a partial sum, and is none",
                        f"the value is cut along {twice}: so is its gradient", f"leave {twice} out of `grad`",
                    )  # fmt: skip
            except FlowError as found:
                findings.append(flow_finding(found.code, found.fault, line, found.why, found.fix, path))
    return findings


TOKENS, WEIGHTS = "", "top_k_weights"
"""The arguments of stacked experts whose gradients are partial sums if each expert is sharded."""


def expert_findings(modules: Modules, is_whole: bool = True) -> Iterator[Finding]:
    """Yield findings for the experts of a plan.

    Args:
        is_whole: whether the plan declares the axes along which samples differ.
    """
    for path, stated in modules.stated.items():
        own = modules.owned.get(path, {})
        is_stacked = any(len(placed.tensor.shape) > 2 for placed in own.values())
        for hook, line in stated.module_flows.uses:
            if hook.name == "dispatch" and hook.args:
                names = (hook.args[0],) if isinstance(hook.args[0], str) else tuple(hook.args[0])
                axes = modules.leaves(name for product in names for name in product.split("*"))
                experts = f"{path}.experts".lstrip(".")
                if axes and is_whole and (is_stacked or any(is_inside(other, experts) for other in modules.owned)):
                    yield from _same_samples(path, axes, line, modules)
                if axes and is_stacked:
                    yield from _stacked(path, axes, modules)
        if path in modules.layers or not (stated.ins or stated.outs) or stated.module_flows.uses:
            continue
        for name, placed in own.items():
            shown = modules.named(axis for axis in _cut(placed, modules) if axis in modules.data)
            if shown:
                yield flow_finding(
                    "E403", f"`{name}` is cut along {shown}, and no token is sent there", placed.line,
                    f"ranks along {shown} have other samples and other parts of `{placed.spec}`: each sample meets one "
                    "part alone",
                    f"write `use dispatch({shown}, top_k=...)` in the block of `{path}`, or a hook of your own", path,
                )  # fmt: skip
                break


def _cut(placed: Placed, modules: Modules) -> Names:
    """Return the axes over which a parameter is sharded, without axes of one rank, as in flows."""
    layout = placed.layout
    if not isinstance(layout, MeshLayout) or len(layout.grid) != len(modules.axes.mesh.axes):
        return ()
    sizes = enumerate(modules.axes.mesh.axes)
    return tuple(name for i, (name, size) in sizes if i in layout.sharding_axes and size > 1)


def _stacked(path: str, dispatched: Names, modules: Modules) -> Iterator[Finding]:
    """Yield findings for flows of sharded experts: their results and the gradients of their inputs are partial sums."""
    stated, params = modules.stated[path], modules.owned[path]
    inside: dict[str, str] = {}
    for name, placed in params.items():
        inside = dict.fromkeys(_cut(placed, modules), name) | inside
    axes = tuple(a for a in modules.axes.mesh.names if a in inside and a not in dispatched and a not in modules.data)
    if not axes or modules.axes.mesh.size == 1:
        return
    shown = modules.named(axes)
    placed = params[inside[axes[0]]]
    why = f"`{inside[axes[0]]}` is `{placed.spec}`: a rank has a part of each expert along {shown}"
    out = stated.out
    if out is None or not set(axes) <= set(partial_axes(out.before)):
        line = stated.line("out") if out is not None else placed.line
        written = f"`out: {as_written(stated.module_flows.outs[''][0])}`" if out is not None else "no `out`"
        yield flow_finding(
            "E402", f"{written} for experts that leave partial sums along {shown}", line,
            f"{why}, so what it makes is a partial sum until it is summed",
            f"write `out: partial({shown}) -> {as_written(out.after) if out is not None else 'replicate'}`", path,
        )  # fmt: skip
    for name in (TOKENS, WEIGHTS):
        flow = _entering(stated, name)
        if flow is not None and ((flow.declares_grad and not flow.partials) or set(axes) <= set(flow.partials)):
            continue
        side = f"in {name}".strip()
        came = as_written(stated.module_flows.ins[name][0].before) if flow is not None else "replicate"
        what = f"`{side}` is not said" if flow is None else f"`{side}: {came}` does not sum its gradient"
        yield flow_finding(
            "E401", f"{what}, and it is a partial sum along {shown}", stated.line("in", name) or placed.line,
            f"{why}, and multiplies what enters with it: one rank's gradient would be taken for the sum",
            f"write `{side}: {came} grad partial({shown})`", path,
        )  # fmt: skip


def _entering(stated: StatedFlows, name: str) -> Flow | None:
    return stated.ins.get(name) or (stated.ins.get("hidden_states") if not name else None)


def _same_samples(path: str, dispatched: Names, line: Line, modules: Modules) -> Iterator[Finding]:
    """Yield a finding if tokens are sent along axes on which all ranks have the same tokens."""
    axes = [axis for axis in dispatched if axis not in modules.data]
    if axes:
        shown, data = modules.named(axes), modules.axes.data
        yield flow_finding(
            "E401", f"tokens are sent along {shown}, and samples do not differ along it", line,
            f"every rank along {shown} sends the same tokens: the gradients of experts would be {modules.times(axes)} "
            f"times too large; the data axes are {', '.join(data) or 'none'}",
            f"write `data {'*'.join([*data, shown])}`", path,
        )  # fmt: skip


def fused_findings(modules: Modules) -> Iterator[Finding]:
    """Yield findings for parameters of blocks (from `dims` lines or a class) that a rank's code would split wrongly."""
    for path, params in modules.owned.items():
        stated = modules.stated.get(path)
        if stated is None or not (stated.ins or stated.outs):
            continue
        for placed in params.values():
            dims, spec = placed.tensor.dims or (), placed.spec
            for dim, lengths in modules.resolved.model.blocks(placed.tensor.name).items():
                cut = spec.dims[dims.index(dim)] if isinstance(spec, Spec) and len(spec.dims) == len(dims) else None
                if not isinstance(cut, Cut) or set(accumulate(lengths)) <= set(_ends(cut, sum(lengths))):
                    continue
                if _gets_shards(cut, dim, path, stated, modules):
                    yield _fused_finding(placed, dim, lengths, cut)


def _gets_shards(cut: Cut, dim: str, path: str, stated: StatedFlows, modules: Modules) -> bool:
    """Whether the module's code gets shards of this dim, not the full dim."""
    axes = set(modules.leaves(cut.axes))
    layer = modules.layers.get(path)
    if layer is None or layer.kind.name != "linear" or dim not in ("in", "out"):
        return bool(axes)
    flow: Flow | None = stated.out if dim == "out" else stated.ins.get("")
    if flow is None:
        return bool(axes)
    return bool(axes & set(cut_axes(flow.after if dim == "out" else flow.before)))


def _ends(cut: Cut, length: int) -> list[int]:
    """Return the ends of the blocks in which a dim is sharded."""
    shares = (1,) * cut.blocks if isinstance(cut.blocks, int) else cut.blocks
    return [length * end // sum(shares) for end in accumulate(shares)]


def _fused_finding(placed: Placed, dim: str, lengths: Sequence[int], cut: Cut) -> Finding:
    tensor, origin = placed.tensor, origin_of(placed.line)
    shares = [length // math.gcd(*lengths) for length in lengths]
    blocks = str(len(lengths)) if len(set(shares)) == 1 else ", ".join(map(str, shares))
    call = re.fullmatch(r"(colwise\(.*?)(?:,\s*blocks\s*=\s*\w+)?(\s*\))", origin.text, re.DOTALL) if origin else None
    written = f"`blocks({blocks})` after `{'*'.join(cut.axes)}`"
    if call is not None and blocks.isdecimal():
        written = f"`{call[1]}, blocks={blocks}{call[2]}`"
    as_what = "one" if cut.blocks == 1 else f"{len(_ends(cut, sum(lengths)))} others"
    return flow_finding(
        "E206", f"dim `{dim}` is {len(lengths)} blocks laid end to end, and is cut as {as_what}", placed.line,
        f"{tensor.name} is {shape_text(tensor.shape, tensor.dims)}, and {dim} = {' + '.join(map(str, lengths))}: code "
        "that takes the blocks apart would find other shares of them on each rank",
        f"write {written}", tensor.name, "layout",
    )  # fmt: skip
