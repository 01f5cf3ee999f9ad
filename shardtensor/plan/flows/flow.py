"""Flows: how a plain value enters or leaves a module, ``[-, tp, ...] -> replicate``. Text and its steps; no torch.

The layout left of the arrow is that of the incoming value, the one right of it that of the outgoing value; without an
arrow both are the same. With ``grad partial(a)`` the returning gradient is a partial sum along `a`, with ``grad
replicate`` it is equal on all ranks that hold copies of the value; without either it follows from the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import EllipsisType, MappingProxyType

import attrs

from shardtensor.errors import PlanError
from shardtensor.layout.route import DimStep
from shardtensor.spec.nodes import Cut, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec

Axes = tuple[str, ...]


@attrs.frozen(cache_hash=True)
class Flow:
    """The redistribution of a value at one side of a module.

    Attributes:
        before: its layout left of the arrow.
        after: its layout right of the arrow.
        partials: axes along which the flow declares the gradient from the right to be a partial sum.
        declares_grad: whether the flow declares its gradient, also as one without partial sums (``grad replicate``).
    """

    before: Spec
    after: Spec
    partials: Axes = ()
    declares_grad: bool = attrs.field(default=attrs.Factory(lambda self: bool(self.partials), takes_self=True))

    @property
    def returned(self) -> Axes:
        """Axes along which the gradient is still a partial sum when it has come back through the flow.

        Where the value is summed on the way to all ranks, so is a gradient that is declared a partial sum: each rank
        uses the sum with other slices.
        """
        if not self.partials:
            return ()
        stay = (*partial_axes(self.after), *cut_axes(self.after))
        summed = [axis for axis in partial_axes(self.before) if axis not in stay]
        return tuple(axis for axis in self.partials if axis not in summed)

    def __str__(self) -> str:
        arrow = str(self.before) if self.before == self.after else f"{self.before} -> {self.after}"
        grad = f"partial({'*'.join(self.partials)})" if self.partials else "replicate"
        return f"{arrow} grad {grad}" if self.declares_grad else arrow


def read_flow(flow: Flow | Spec | str) -> Flow:
    """Parse a flow.

    Raises:
        PlanError: it is no flow; SpecError: one of its layouts is no layout.

    Example:
        >>> flow = read_flow("partial(tp) -> [-, tp, ...]")
        >>> str(flow.before), str(flow.after), str(flow)
        ('replicate partial(tp)', '[-, tp, ...]', 'replicate partial(tp) -> [-, tp, ...]')
        >>> read_flow("[..., kvg] grad partial(kvr)").partials, str(read_flow("[..., kvg] grad replicate"))
        (('kvr',), '[..., kvg] grad replicate')
    """
    if isinstance(flow, Flow):
        return flow
    if not isinstance(flow, str):
        return flow_of([as_spec(flow)])
    arrow, _, grad = flow.partition(" grad ")
    return flow_of([as_spec(side.strip()) for side in arrow.split("->")], as_spec(grad.strip()) if grad else None)


def flow_of(sides: Sequence[ShardingSpec], grad: ShardingSpec | None = None) -> Flow:
    """Return the flow with these layouts, one or two, and that of its gradient.

    Raises:
        PlanError: they are no layouts of values, or of its gradient.
    """
    if len(sides) > 2:
        raise PlanError("a flow has one arrow", {"found": " -> ".join(map(str, sides))}, "write `LAYOUT -> LAYOUT`")
    before, after = _of_value(sides[0]), _of_value(sides[-1])
    if grad is None:
        return Flow(before, after)
    returning = _of_value(grad)
    if cuts(returning) and cuts(returning) != cuts(after):
        raise PlanError(
            "a gradient is cut as its value is",
            {"found": f"grad {grad}"},
            f"write `grad {after}`, `grad partial(tp)` for partial sums, or `grad replicate` for copies",
        )
    return Flow(before, after, partial_axes(returning), True)


def _of_value(spec: ShardingSpec) -> Spec:
    if isinstance(spec, Spec) and not (spec.named or spec.flat_part or spec.only_part):
        return spec
    raise PlanError(
        f"`{spec}` is no layout of a value",
        {"why": "a value has no dim names, is not stored, and lies on all ranks"},
        "write such as `replicate`, `[..., tp]`, `[-, tp, ...]`, `partial(tp)`",
    )


@lru_cache(maxsize=4096)
def cuts(spec: Spec) -> Mapping[int, Cut]:
    """Return the cuts of a value by dim: dims before ``...`` count from the front, those after it from the end.

    Example:
        >>> list(cuts(read_flow("[tp, ..., dp]").after))
        [0, -1]
    """
    middle = spec.dims.index(...) if ... in spec.dims else len(spec.dims)
    found = {
        i if i < middle else i - len(spec.dims): dim
        for i, dim in enumerate(spec.dims)
        if not isinstance(dim, EllipsisType | None)
    }
    return MappingProxyType(found)


@lru_cache(maxsize=4096)
def cut_axes(spec: Spec) -> Axes:
    """Return the axes over which a value is sharded."""
    return tuple(axis for cut in cuts(spec).values() for axis in cut.axes)


def as_written(flow: Flow | Spec) -> str:
    """Return the usual text of a flow or a layout: without ``replicate`` before ``partial``.

    Example:
        >>> as_written(read_flow("partial(tp) -> replicate"))
        'partial(tp) -> replicate'
    """
    return str(flow).replace("replicate partial(", "partial(")


def union(*axes: Axes) -> Axes:
    """Return each of the axes once, in the order of their first places."""
    return tuple(dict.fromkeys(axis for each in axes for axis in each))


@lru_cache(maxsize=4096)
def partial_axes(spec: ShardingSpec) -> Axes:
    """Return the axes along which a value is a partial sum."""
    assert isinstance(spec, Spec)
    for part in spec.partial_parts:
        if part.op != "sum":
            raise PlanError("a flow adds up", {"found": str(spec)}, "write `partial(tp)`, without `op`")
    return tuple(axis for part in spec.partial_parts for axis in part.axes)


def last_cut(spec: Spec) -> Cut | None:
    """Return the cut of the last dim, or None; the last dim is the one after ``...``, or the last one written."""
    found = spec.dims[-1] if spec.dims else None
    return found if isinstance(found, Cut) else None


class FlowError(PlanError):
    """A flow contradicts itself or the tensors of its layer.

    Attributes:
        code: of the finding.
        side: ``in``, ``out``, or the parameter whose layout is wrong; empty if only the flow is known.
        fault, why, fix: as in a finding.
    """

    def __init__(self, code: str, side: str, fault: str, why: str, fix: str) -> None:
        super().__init__(fault, {"why": why}, fix)
        self.code, self.side, self.why, self.fix = code, side, why, fix


@lru_cache(maxsize=4096)
def flow_route(flow: Flow, partials: Axes = (), side: str = "") -> tuple[DimStep, ...]:
    """Return the steps of a flow, as `shardtensor.layout.route` does for layouts.

    Args:
        partials: axes along which the gradient from the right is a partial sum, besides those that the flow declares.
        side: of the layer, for errors.

    Raises:
        FlowError: (a PlanError) no steps lead from the left to the right layout.

    Example:
        >>> [step.kind for step in flow_route(read_flow("[-, tp, ...] -> replicate"), ("tp",))]
        ['all_gather']
        >>> [step.kind for step in flow_route(read_flow("partial(tp) -> [-, tp, ...]"))]
        ['reduce_scatter']
    """
    partials = union(flow.partials, partials)
    before, after = cuts(flow.before), cuts(flow.after)
    leaving = {dim: cut for dim, cut in before.items() if after.get(dim) != cut}
    coming = {dim: cut for dim, cut in after.items() if before.get(dim) != cut}
    partial, kept = partial_axes(flow.before), partial_axes(flow.after)
    if not set(kept) <= set(partial):
        fix = "leave out `partial` after the arrow"
        raise FlowError("E404", side, "a copy does not become partial sums", f"the flow is `{flow}`", fix)
    for cut in (*leaving.values(), *coming.values()):
        if cut.blocks != 1:
            fix = "let the value pass as it is, or cut it evenly or `balanced`"
            raise FlowError("E402", side, f"`{cut}` cannot be cut or joined on the way", f"the flow is `{flow}`", fix)
    steps: list[DimStep] = []
    open_axes = [axis for axis in partial if axis not in kept]
    passed = {*cut_axes(flow.before), *cut_axes(flow.after), *partial}
    summed = tuple(axis for axis in partials if axis not in passed)
    if summed:
        steps.append(DimStep("sum_gradient", summed, sums=True))
    for dim, cut in list(coming.items()):
        if open_axes and set(cut.axes) == set(open_axes):
            steps.append(DimStep("reduce_scatter", cut.axes, dim, cut))
            open_axes, _ = [], coming.pop(dim)
    if open_axes:
        steps.append(DimStep("all_reduce", tuple(open_axes)))
        used_apart = tuple(axis for axis in open_axes if axis in partials)
        if used_apart:  # all ranks have the sum, and each uses it with other slices
            steps.append(DimStep("sum_gradient", used_apart, sums=True))
    for dim, cut in leaving.items():
        if 0 < len(set(cut.axes) & set(partials)) < len(cut.axes):
            raise FlowError(
                "E401", side,
                f"its gradient is a partial sum along {', '.join(axis for axis in cut.axes if axis in partials)} only",
                f"the flow is `{flow}`, cut over {'*'.join(cut.axes)}",
                "say the others, too: `grad partial(...)` where the copies differ",
            )  # fmt: skip
        steps.append(DimStep("all_gather", cut.axes, dim, cut, set(cut.axes) <= set(partials)))
    for dim, cut in coming.items():
        steps.append(DimStep("slice", cut.axes, dim, cut))
    return tuple(steps)
