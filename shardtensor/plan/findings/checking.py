"""All checks of a plan that was matched to a model: flows, and whether ranks share the work.

The second are axes that nobody uses, empty and unequal shards, large copies and padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardtensor.layout.explain import say_bytes
from shardtensor.layout.layout import CutLayout, FlatLayout, Layout
from shardtensor.layout.pieces import Pieces
from shardtensor.plan.findings.brief import brief_names, skeleton
from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.findings.places import mesh_place
from shardtensor.plan.flows.gradients import Flows, check_flows
from shardtensor.plan.match.misfit import shape_text
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.models.model import BYTES
from shardtensor.plan.outlook.memory import plan_bytes
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Passing, Placed, Resolved
from shardtensor.spec.nodes import Cut, Spec


def check_plan(resolved: Resolved, flows: Flows | None = None) -> tuple[Finding, ...]:
    """Find everything that is wrong with a plan for a model: what resolving found, flows, and the balance of ranks.

    Flows are looked at when every tensor lies somewhere, and the balance when nothing is wrong.

    Args:
        flows: of the plan, where they are worked out already.
    """
    findings = resolved.findings
    if not resolved.errors:
        findings = (*findings, *(flows.findings() if flows is not None else check_flows(resolved)))
    if not any(finding.severity == "error" for finding in findings):
        findings = (*findings, *_imbalances(resolved))
    return findings


IMBALANCE = 0.1
"""How much more bytes than the emptiest rank, as a share of these, the fullest may hold."""

LARGE = 0.01
"""Of the bytes of all tensors: what is large."""


def _imbalances(resolved: Resolved) -> Iterator[Finding]:
    """W304, W305, W306 and N002 of a plan without errors."""
    plan, own = resolved.plan, own_tensors(resolved)
    yield from _idle_axes(plan, own, resolved.modules)
    for placed in own:
        yield from _empty_shards(placed)
    yield from _unequal(resolved, own)
    yield from _large_copies(plan, own)
    for placed in own:
        yield from _padding(placed)


def _idle_axes(plan: Plan, own: Sequence[Placed], modules: Mapping[str, Passing]) -> Iterator[Finding]:
    axes, sizes = plan.axes, dict(plan.axes.mesh.axes)
    names = set(axes.data)
    specs = {placed.spec for placed in own if isinstance(placed.spec, Spec)}
    if len(specs) < len({placed.spec for placed in own}):
        return  # layouts that name devices use ranks, not axes
    for spec in specs:
        names |= spec.axis_names
    for placed in own:
        names |= set(placed.stored.axes if placed.stored is not None else ())
    for passing in modules.values():
        for flow, _ in (*passing.ins.values(), *passing.outs.values()):
            names |= flow.before.axis_names | flow.after.axis_names | set(flow.addends)
        for hook, _ in passing.uses:
            for arg in (*hook.args, *hook.kwargs.values()):
                names |= {each for each in (arg if isinstance(arg, tuple) else (arg,)) if each in axes.names}
        for spec, _ in passing.locals.values():
            names |= spec.axis_names if isinstance(spec, Spec) else set()
    used = axes.leaves(names)
    for name, size in sizes.items():
        if size > 1 and name not in used:
            yield Finding(
                "W304", f"no layout and no `data` uses the axis `{name}` of {size}", mesh_place(plan),
                f"the {size} ranks along {name} do the same work",
                f"cut something over {name}, write `data {name}`, or leave the axis out", (), "",
            )  # fmt: skip


def _empty_shards(placed: Placed) -> Iterator[Finding]:
    layout = placed.layout
    for dim, pieces in _cut_dims(layout):
        empty = _empty(pieces)
        if empty:
            info = placed.tensor
            axes = _axes_of(placed, dim)
            yield Finding(
                "W305", f"{empty} of the {pieces.count} pieces along {axes} {'is' if empty == 1 else 'are'} empty",
                _origin(placed),
                f"{info.name} is {shape_text(info.shape, info.dims)}: dim {dim} of {info.shape[dim]} has too few units",
                "cut over fewer ranks, or another dim", (), info.name,
            )  # fmt: skip


def _cut_dims(layout: Layout) -> list[tuple[int, Pieces]]:
    if isinstance(layout, FlatLayout):
        layout = layout.inner
    if not isinstance(layout, CutLayout):
        return []
    return [(dim, cut.pieces) for dim, cut in enumerate(layout.dims) if cut is not None]


def _empty(pieces: Pieces) -> int:
    """The number of empty pieces; of large cuts told by the last piece, as the smallest come last."""
    if pieces.length == 0 or (pieces.size(pieces.count - 1) and pieces.count > 4096):
        return 0
    return sum(pieces.size(i) == 0 for i in range(pieces.count))


def _unequal(resolved: Resolved, own: Sequence[Placed]) -> Iterator[Finding]:
    held = plan_bytes(resolved, optimizer="none")
    least, most = (each.parameters + each.buffers for each in (held.least, held.most))
    if most <= least * (1 + IMBALANCE):
        return
    more = f"{round((most / least - 1) * 100)} % more bytes than others" if least else "everything, and others nothing"
    parts: dict[str, tuple[int, list[str]]] = {}
    for placed in own:
        size, names = parts.get(skeleton(placed.tensor.name), (0, []))
        size += _held(placed, held.most_rank) - _held(placed, held.least_rank)
        parts[skeleton(placed.tensor.name)] = size, [*names, placed.tensor.name]
    unequal = sorted((part for part in parts.values() if part[0] > 0), reverse=True)
    yield Finding(
        "W305", f"some ranks hold {more}", mesh_place(resolved.plan),
        f"rank {held.most_rank} holds {say_bytes(most)} of parameters and buffers, "
        f"rank {held.least_rank} {say_bytes(least)}",
        "cut the large tensors evenly, or over other axes",
        tuple(f"{say_bytes(size)} more of {', '.join(brief_names(names))}" for size, names in unequal[:3]),
    )  # fmt: skip


def _held(placed: Placed, rank: int) -> int:
    return 0 if placed.stored is not None else placed.layout.numel(rank) * BYTES[placed.tensor.dtype]


def _large_copies(plan: Plan, own: Sequence[Placed]) -> Iterator[Finding]:
    total = sum(placed.tensor.bytes for placed in own)
    at_unmatched = plan.unmatched.origin if plan.unmatched is not None else None
    if plan.axes.mesh.size < 2:
        return
    for placed in own:
        info = placed.tensor
        if placed.stored is None and placed.layout.is_replicated and info.bytes > LARGE * total:
            share = f"{100 * info.bytes / total:.1f} %"
            yield Finding(
                "W306", f"a large tensor is kept whole on every rank: {share} of all bytes",
                _origin(placed) or at_unmatched,
                f"{info.name} is {shape_text(info.shape, info.dims)}, {say_bytes(info.bytes)}",
                "cut it over an axis, or keep it flat with `store`", (), info.name,
            )  # fmt: skip


def _padding(placed: Placed) -> Iterator[Finding]:
    if not isinstance(placed.spec, Spec):
        return
    for dim, cut in enumerate(placed.spec.dims):
        if not isinstance(cut, Cut) or cut.pad is None:
            continue
        for at, pieces in _cut_dims(placed.layout):
            step = pieces.size(0)
            rows = step * pieces.count - pieces.length
            if at != dim or rows <= 0:
                continue
            info = placed.tensor
            each = info.numel // max(info.shape[dim], 1) * BYTES[info.dtype]
            yield Finding(
                "N002", f"{rows} rows of padding, {say_bytes(rows * each)}, for {pieces.count} equal pieces of {step}",
                _origin(placed),
                f"{info.name} is {shape_text(info.shape, info.dims)}; "
                f"dim {dim} is cut as if it were {step * pieces.count}",
                "", (), info.name,
            )  # fmt: skip


def _origin(placed: Placed) -> Origin | None:
    return placed.line.origin if placed.line is not None else None


def _axes_of(placed: Placed, dim: int) -> str:
    spec = placed.spec
    cut = spec.dims[dim] if isinstance(spec, Spec) and dim < len(spec.dims) else None
    return "*".join(cut.axes) if isinstance(cut, Cut) else f"dim {dim}"
