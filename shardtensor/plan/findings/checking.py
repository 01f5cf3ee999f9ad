"""All checks of a plan that was matched to a model: flows, and whether ranks share the work.

The second finds axes without use, empty and unequal shards, large copies and padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardtensor.layout.explain import bytes_text
from shardtensor.layout.layout import FlatLayout, Layout, MeshLayout
from shardtensor.layout.pieces import Pieces
from shardtensor.plan.estimates.memory import plan_bytes
from shardtensor.plan.findings.brief import brief_names
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.flows.gradients import Flows, check_flows
from shardtensor.plan.line import mesh_place, origin_of
from shardtensor.plan.match.layout_errors import shape_text
from shardtensor.plan.match.patterns import starred
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import ModuleFlows, Placed, Resolved
from shardtensor.spec.nodes import Cut, Spec


def check_plan(resolved: Resolved, flows: Flows | None = None) -> tuple[Finding, ...]:
    """Return all findings of a plan for a model: those of `resolve`, of flows, and of the balance of ranks.

    Flows are checked if every tensor has a layout, and the balance if there is no error.

    Args:
        flows: of the plan, if they are computed already.
    """
    findings = resolved.findings
    if not resolved.errors:
        findings = (*findings, *(flows.findings() if flows is not None else check_flows(resolved)))
    if not any(finding.severity == "error" for finding in findings):
        findings = (*findings, *_imbalances(resolved))
    return findings


OF_FLOWS = ("E401", "E402", "E403", "E404")
"""Codes of errors in the values that pass between modules: other rules for one module may mend them."""


def errors_of(resolved: Resolved) -> tuple[Finding, ...]:
    """Return the errors among the findings of `check_plan`."""
    return tuple(finding for finding in check_plan(resolved) if finding.severity == "error")


IMBALANCE = 0.1
"""The largest difference between the bytes of the fullest and the emptiest rank, as a fraction of the latter."""

LARGE = 0.01
"""A tensor with more than this fraction of all bytes is large."""


def _imbalances(resolved: Resolved) -> Iterator[Finding]:
    """Yield W304, W305, W306 and N002 of a plan without errors."""
    plan, own = resolved.plan, own_tensors(resolved)
    yield from _idle_axes(plan, own, resolved.modules)
    for placed in own:
        yield from _empty_shards(placed)
    yield from _unequal(resolved, own)
    yield from _large_copies(plan, own)
    for placed in own:
        yield from _padding(placed)


def _idle_axes(plan: Plan, own: Sequence[Placed], modules: Mapping[str, ModuleFlows]) -> Iterator[Finding]:
    specs = {placed.spec for placed in own}
    if not all(isinstance(spec, Spec) for spec in specs):
        return  # layouts that name devices use ranks, not axes
    names = set(plan.axes.data).union(*(spec.axis_names for spec in specs if isinstance(spec, Spec)))
    names.update(*(placed.stored.axes for placed in own if placed.stored is not None))
    for module_flows in modules.values():
        for flow, _ in (*module_flows.ins.values(), *module_flows.outs.values()):
            names |= flow.before.axis_names | flow.after.axis_names | set(flow.partials)
        for hook, _ in module_flows.uses:
            for arg in (*hook.args, *hook.kwargs.values()):
                names |= {each for each in (arg if isinstance(arg, tuple) else (arg,)) if each in plan.axes.names}
        names.update(*(spec.axis_names for spec, _ in module_flows.locals.values()))
    used = plan.axes.leaves(names)
    for name, size in plan.axes.mesh.axes:
        if size > 1 and name not in used:
            yield Finding(
                "W304", f"no layout and no `data` uses the axis `{name}` of {size}", mesh_place(plan),
                f"the {size} ranks along {name} do the same work",
                f"cut something over {name}, write `data {name}`, or leave the axis out",
            )  # fmt: skip


def _of(placed: Placed, code: str, fault: str, more: str, fix: str = "", origin: Origin | None = None) -> Finding:
    """Return a finding about one tensor, with its shape."""
    info = placed.tensor
    why = f"{info.name} is {shape_text(info.shape, info.dims)}{more}"
    return Finding(code, fault, origin_of(placed.line) or origin, why, fix, (), info.name)


def _empty_shards(placed: Placed) -> Iterator[Finding]:
    for dim, pieces in _cut_dims(placed.layout):
        if pieces.length == 0 or (pieces.size(pieces.count - 1) and pieces.count > 4096):
            continue  # of very many shards only the last one is read: the smallest come last
        empty = sum(pieces.size(i) == 0 for i in range(pieces.count))
        if empty:
            cut = placed.spec.dims[dim] if isinstance(placed.spec, Spec) and dim < len(placed.spec.dims) else None
            axes = "*".join(cut.axes) if isinstance(cut, Cut) else f"dim {dim}"
            fault = f"{empty} of the {pieces.count} pieces along {axes} {'is' if empty == 1 else 'are'} empty"
            more = f": dim {dim} of {placed.tensor.shape[dim]} has too few units"
            yield _of(placed, "W305", fault, more, "cut over fewer ranks, or another dim")


def _cut_dims(layout: Layout) -> list[tuple[int, Pieces]]:
    if isinstance(layout, FlatLayout):
        layout = layout.inner
    if not isinstance(layout, MeshLayout):
        return []
    return [(dim, cut.pieces) for dim, cut in enumerate(layout.dims) if cut is not None]


def _unequal(resolved: Resolved, own: Sequence[Placed]) -> Iterator[Finding]:
    held = plan_bytes(resolved, optimizer="none")
    least, most = (each.parameters + each.buffers for each in (held.least, held.most))
    if most <= least * (1 + IMBALANCE):
        return
    more = f"{round((most / least - 1) * 100)} % more bytes than others" if least else "everything, and others nothing"
    parts: dict[str, tuple[int, list[str]]] = {}
    for placed in own:
        name, numel = placed.tensor.name, placed.layout.numel
        size, names = parts.get(starred(name), (0, []))
        if placed.stored is None:
            size += (numel(held.most_rank) - numel(held.least_rank)) * BYTES[placed.tensor.dtype]
        parts[starred(name)] = size, [*names, name]
    unequal = sorted((part for part in parts.values() if part[0] > 0), reverse=True)
    yield Finding(
        "W305", f"some ranks hold {more}", mesh_place(resolved.plan),
        f"rank {held.most_rank} holds {bytes_text(most)} of parameters and buffers, "
        f"rank {held.least_rank} {bytes_text(least)}",
        "cut the large tensors evenly, or over other axes",
        tuple(f"{bytes_text(size)} more of {', '.join(brief_names(names))}" for size, names in unequal[:3]),
    )  # fmt: skip


def _large_copies(plan: Plan, own: Sequence[Placed]) -> Iterator[Finding]:
    total = sum(placed.tensor.bytes for placed in own)
    at_unmatched = plan.unmatched.origin if plan.unmatched is not None else None
    for placed in own if plan.axes.mesh.size > 1 else ():
        size = placed.tensor.bytes
        if placed.stored is None and placed.layout.is_replicated and size > LARGE * total:
            fault = f"a large tensor is kept whole on every rank: {100 * size / total:.1f} % of all bytes"
            fix = "cut it over an axis, or keep it flat with `store`"
            yield _of(placed, "W306", fault, f", {bytes_text(size)}", fix, at_unmatched)


def _padding(placed: Placed) -> Iterator[Finding]:
    info, dims = placed.tensor, placed.spec.dims if isinstance(placed.spec, Spec) else ()
    for dim, pieces in _cut_dims(placed.layout):
        cut = dims[dim] if dim < len(dims) else None
        rows = pieces.size(0) * pieces.count - pieces.length
        if isinstance(cut, Cut) and cut.pad is not None and rows > 0:
            size = rows * (info.numel // max(info.shape[dim], 1)) * BYTES[info.dtype]
            fault = f"{rows} rows of padding, {bytes_text(size)}, for {pieces.count} equal pieces of {pieces.size(0)}"
            yield _of(placed, "N002", fault, f"; dim {dim} is cut as if it were {pieces.size(0) * pieces.count}")
