"""Changes of a plan's rules for one module: what `check_numeric` tries when a step does not give the dense result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal

import attrs

from shardtensor.plan.findings.finding import Origin
from shardtensor.plan.flows.flow import Flow, as_written, cut_axes, last_cut, read_flow
from shardtensor.plan.line import Line
from shardtensor.plan.match.patterns import matches, starred
from shardtensor.plan.plan import Plan
from shardtensor.plan.python_rules import read_call
from shardtensor.plan.resolved import Resolved
from shardtensor.spec.nodes import Cut, Replicate, Spec


@attrs.frozen(eq=False)
class Edit:
    """A change of one rule.

    Attributes:
        plan: with the change.
        text: what to write.
        origin: of the rule that changes; None for a new rule.
    """

    plan: Plan
    text: str
    origin: Origin | None = None


def edits(resolved: Resolved, path: str, axes: tuple[str, ...]) -> tuple[Iterator[Edit], ...]:
    """Return the plans that differ in the rules for one module, the more likely ones first: its style and the flows
    that other modules of the plan have; other flows; layouts and attributes that count.

    Args:
        axes: along which ranks share the work of a sample.
    """
    usual = {as_written(line.value) for line in resolved.plan.lines if line.kind in ("in", "out")}
    flows = [*_flow_edits(resolved, path, axes)]
    styles = [*_style_edits(resolved, path, axes, usual)]
    return (
        chain(styles[:-1], _argument_edits(resolved, path), (edit for edit, text in flows if text in usual)),
        (edit for edit, text in flows if text not in usual),
        chain(_count_edits(resolved, path, axes), _layout_edits(resolved, path), styles[-1:]),
    )


def _replaced(plan: Plan, old: Line | None, *new: Line) -> Plan:
    return attrs.evolve(plan, lines=(*(line for line in plan.lines if line is not old), *new))


def _style_edits(resolved: Resolved, path: str, axes: tuple[str, ...], usual: Iterable[str]) -> Iterator[Edit]:
    """Yield the plans in which a linear layer is column-parallel, row-parallel or replicated, or a norm is along
    another stream, by one rule."""
    kind, plan = resolved.model.kind(path), resolved.plan
    if kind is None or kind.name not in ("linear", "norm"):
        return
    own = resolved.modules.get(path)
    placed = [each for name, each in resolved.tensors.items() if name.rpartition(".")[0] == path]
    old = {id(line): line for line in (each.line for each in placed) if line is not None}
    old |= {id(line): line for side in ((own.ins, own.outs) if own else ()) for _, line in side.values()}
    cuts = [dim for each in placed if isinstance(each.spec, Spec) for dim in each.spec.dims if isinstance(dim, Cut)]
    first = next(iter(old.values()), None)
    written = (first.module, first.pattern) if first is not None else ()
    pattern = next((text for text in written if text and matches(text, path)), starred(path))
    rest = tuple(line for line in plan.lines if id(line) not in old)
    at = first.origin if first is not None else None
    for axis in plan.axes.named(axes):
        cut = attrs.evolve(cuts[0], axes=(axis,), blocks=1) if cuts else Cut(axis)
        partial = f"partial({axis}) -> "
        sums = [text for text in usual if text.startswith(partial)] or [f"{partial}replicate"]
        if kind.name == "norm":
            for text in sorted((f"[-, {axis}, ...]", f"[..., {axis}, -]"), key=lambda text: text not in usual):
                new = [Line(pattern, value=Replicate()), *(Line(pattern, side, read_flow(text)) for side in _SIDES)]
                yield Edit(attrs.evolve(plan, lines=(*rest, *new)), f"write `along({text})` for `{pattern}`", at)
            continue
        styles = [_Style(f"colwise({axis})", "out", cut, leaves=f"[..., {axis}]")]
        for text in sums:
            to = text.removeprefix(partial)
            name = f"rowwise({axis})" if to == "replicate" else f"rowwise({axis}, to={to})"
            styles.append(_Style(name, "in", cut, f"[..., {axis}]", text))
        for n in (2, 3):
            name, leaves = f"colwise({axis}, blocks={n})", f"[..., {axis} blocks({n})]"
            styles.append(_Style(name, "out", attrs.evolve(cut, blocks=n), leaves=leaves))
        for style in styles:
            text = f"write `{style.name}` for `{pattern}`"
            yield Edit(attrs.evolve(plan, lines=(*rest, *style.lines(pattern))), text, at)
    whole = attrs.evolve(plan, lines=(*rest, Line(pattern, value=Replicate())))
    yield Edit(whole, f"write `replicate` for `{pattern}`", at)


_SIDES: tuple[Literal["in", "out"], ...] = ("in", "out")


@attrs.frozen
class _Style:
    """A style of `specs/std/styles.shard`, as rules for one layer."""

    name: str
    dim: str
    cut: Cut
    enters: str = ""
    leaves: str = ""

    def lines(self, pattern: str) -> Iterator[Line]:
        weight = Spec(**{self.dim: self.cut})
        yield Line(f"{pattern}.weight", value=weight, module=pattern)
        bias = weight if self.dim == "out" else Replicate()
        yield Line(f"{pattern}.bias", value=bias, module=pattern, is_optional=True)
        if self.enters:
            yield Line(pattern, "in", read_flow(self.enters), module=pattern)
        if self.leaves:
            yield Line(pattern, "out", read_flow(self.leaves), module=pattern)


def _argument_edits(resolved: Resolved, path: str) -> Iterator[Edit]:
    """Yield the plans in which one more argument of the module enters as a replicated value."""
    info, own = resolved.model.modules.get(path), resolved.modules.get(path)
    stated = own.ins if own is not None else {}
    for name in info.arguments[1:] if info is not None and stated else ():
        if name not in stated:
            line = Line(starred(path), "in", Flow(Replicate(), Replicate()), name, module=starred(path))
            text = f"write `in {name}: replicate` in the rules of `{starred(path)}`"
            yield Edit(_replaced(resolved.plan, None, line), text)


def _flow_edits(resolved: Resolved, path: str, axes: tuple[str, ...]) -> Iterator[tuple[Edit, str]]:
    """Yield plans with another flow for one side of the module, and the text of the flow."""
    own = resolved.modules.get(path)
    for axis in resolved.plan.axes.named(axes):
        for side in ("out", "in"):
            flow, line = (((own.outs if side == "out" else own.ins) if own else {}).get("")) or (None, None)
            for text in _flows(side, flow, axis, axes):
                yield _with_flow(resolved.plan, path, side, line, text), text
            if line is not None:
                text = f"leave out `{side}: {as_written(line.value)}` in the rules of `{starred(path)}`"
                yield Edit(_replaced(resolved.plan, line), text, line.origin), ""


def _flows(side: str, flow: Flow | None, axis: str, factors: tuple[str, ...]) -> Iterator[str]:
    """Yield other flows for one side of a module, the more usual ones first."""
    stream, features, heads = f"[-, {axis}, ...]", f"[..., {axis}]", f"[..., {axis}, -]"
    before = as_written(flow.before) if flow is not None else ""
    texts = [f"partial({axis}) -> replicate", f"partial({axis}) -> {stream}", features, stream, heads]
    if side == "in":
        texts = ["replicate", f"{stream} -> replicate", stream, heads, features, f"replicate -> {features}"]
        texts += [f"replicate -> {stream}"]
    if flow is not None:
        after = as_written(flow.after)
        arrow = before if before == after else f"{before} -> {after}"
        texts = [
            arrow,
            *(f"{arrow} grad partial({name})" for name in dict.fromkeys((axis, *factors))),
            f"{before} -> replicate",
            f"{before} -> {stream}",
            *texts,
        ]
    written = as_written(flow) if flow is not None else ""
    yield from (text for text in dict.fromkeys(texts) if text != written)


def _with_flow(plan: Plan, path: str, side: str, line: Line | None, text: str) -> Edit:
    value = read_flow(text)
    if line is not None:
        return Edit(_replaced(plan, line, attrs.evolve(line, value=value)), f"write `{side}: {text}`", line.origin)
    new = Line(starred(path), "in" if side == "in" else "out", value, module=starred(path), is_optional=True)
    return Edit(_replaced(plan, None, new), f"write `{side}: {text}` in the rules of `{starred(path) or 'the model'}`")


def _layout_edits(resolved: Resolved, path: str) -> Iterator[Edit]:
    """Yield layouts of the module's own tensors with another dim sharded, in blocks, or with no dim sharded."""
    for name, placed in resolved.tensors.items():
        line, spec = placed.line, placed.spec
        if name.rpartition(".")[0] != path or line is None or not isinstance(spec, Spec):
            continue
        dims = list(spec.dims)
        cuts = [i for i, dim in enumerate(dims) if isinstance(dim, Cut)]
        found: list[Spec] = []
        for i in cuts:
            cut = dims[i]
            assert isinstance(cut, Cut)
            found += [_spec(dims, i, attrs.evolve(cut, blocks=n)) for n in (2, 3) if cut.blocks != n]
            found += [_spec(dims, i, attrs.evolve(cut, blocks=1)) for _ in range(cut.blocks != 1)]
            for j in range(len(dims)):
                if j not in cuts:
                    moved = [None if k == i else cut if k == j else dim for k, dim in enumerate(dims)]
                    found.append(Spec(*moved))
        if len(cuts) == 2:
            i, j = cuts
            found.append(Spec(*(dims[j] if k == i else dims[i] if k == j else dim for k, dim in enumerate(dims))))
        if cuts:
            found.append(Replicate())
        for each in found:
            text = f"write `{each}` for `{starred(name)}`"
            yield Edit(_replaced(resolved.plan, line, attrs.evolve(line, value=each)), text, line.origin)


def _spec(dims: list, i: int, cut: Cut) -> Spec:
    return Spec(*(cut if k == i else dim for k, dim in enumerate(dims)))


def _count_edits(resolved: Resolved, path: str, axes: tuple[str, ...]) -> Iterator[Edit]:
    """Yield plans in which attributes of the module that are whole numbers become the rank's share."""
    info, own = resolved.model.modules.get(path), resolved.modules.get(path)
    stated = own.locals if own is not None else {}
    for axis in dict.fromkeys((*resolved.plan.axes.named(axes), *axes)):
        size = resolved.plan.axes.size(axis)
        names = [
            name for name, value in (info.counts if info is not None else {}).items()
            if name not in stated and size > 1 and value >= size and value % size == 0 and "idx" not in name
        ]  # fmt: skip
        beside = next((line.origin for _, line in stated.values()), None)
        for some in [*([name] for name in names), *([names] if len(names) > 1 else [])]:
            new = [Line(starred(path), "local", Spec(axis), name, module=starred(path)) for name in some]
            text = ", ".join(f"`local {name}: [{axis}]`" for name in some)
            plan = attrs.evolve(resolved.plan, lines=(*resolved.plan.lines, *new))
            yield Edit(plan, f"write {text} in the rules of `{starred(path)}`", beside)
    for name, (_, line) in stated.items():
        text = f"leave out `local {name}` in the rules of `{starred(path)}`"
        yield Edit(_replaced(resolved.plan, line), text, line.origin)


def loss_edit(resolved: Resolved) -> Iterator[Edit]:
    """Yield the plan with ``use cross_entropy()``, if a module returns features that are sharded."""
    outs = (flow for each in resolved.modules.values() for flow, _ in each.outs.values())
    used = any(hook.name == "cross_entropy" for each in resolved.modules.values() for hook, _ in each.uses)
    if not used and any(last_cut(flow.after) is not None and cut_axes(flow.after) for flow in outs):
        line = Line("", "use", read_call("cross_entropy()"))
        yield Edit(attrs.evolve(resolved.plan, lines=(*resolved.plan.lines, line)), "write `use cross_entropy()`")
