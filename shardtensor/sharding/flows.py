"""From the flows that a plan states to what each layer does: checked against its tensors, and against one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.along_dim import Stretches
from shardtensor.comm.group import Group, team_along
from shardtensor.errors import PlanError
from shardtensor.layout.layout import CutLayout, Layout
from shardtensor.mesh import Mesh
from shardtensor.parallel.dim_names import dim_names
from shardtensor.parallel.layers import LayerFlow, fused, layer_class
from shardtensor.parallel.moves import Gather, Move, Step, Sum, SumGradient, SumScatter, Take
from shardtensor.plan.flows.flow import (
    Axes,
    Change,
    Flow,
    changes,
    cut_axes,
    cuts,
    last_cut,
    partial_axes,
    read_flow,
    union,
)
from shardtensor.plan.models.layer_kinds import kind_named
from shardtensor.spec.nodes import Replicate, ShardingSpec, Spec

REPLICATE = read_flow("replicate")


@attrs.frozen
class Stated:
    """The flows that a plan states for one module.

    Attributes:
        ins: by the name of the argument; None stands for the first.
        out: of what the module returns; of several results, of the first.
        others: of other results, by their position or name.
    """

    ins: Mapping[str | None, Flow] = attrs.field(factory=dict)
    out: Flow | None = None
    others: Mapping[str, Flow] = attrs.field(factory=dict)

    @property
    def outs(self) -> tuple[Flow, ...]:
        """Of all results."""
        return (*((self.out,) if self.out is not None else ()), *self.others.values())


@attrs.frozen(eq=False)
class Tensors:
    """The layouts of a module's own parameters, by name; nothing for those that stay plain.

    Attributes:
        specs: for messages.
        layouts: bound to the mesh of the group.
        mesh: of the group; None where it has one axis.
        axis: what the plan calls that one axis.
    """

    specs: Mapping[str, ShardingSpec] = attrs.field(factory=dict)
    layouts: Mapping[str, Layout] = attrs.field(factory=dict)
    mesh: Mesh | None = None
    axis: str = "*"

    def cut(self, module: nn.Module, name: str, dim: str) -> Axes:
        """The axes over which a named dim of a parameter is cut."""
        layout = self.layouts.get(name)
        names = dim_names(module, name)
        if layout is None or names is None:
            return ()
        grid = self.mesh.sizes if self.mesh is not None else layout.grid[:1]
        if not isinstance(layout, CutLayout) or layout.partial or not _lies_in(layout.grid, grid):
            raise PlanError(
                "flows go with dims cut over axes", {name: str(self.specs[name])}, "write the spec in axes: `[tp, -]`"
            )
        cut = layout.dims[names.index(dim)]
        if cut is None:
            return ()
        if self.mesh is None:
            return (self.axis,)
        return tuple(self.mesh.names[i] for i in cut.axes if layout.grid[i] == grid[i])  # the rest holds nothing


def _lies_in(grid: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    """Whether a layout's grid is the mesh, or the part of it at one coordinate of some axes."""
    return len(grid) == len(mesh) and all(size in (1, whole) for size, whole in zip(grid, mesh, strict=True))


class Binder:
    """Turns changes along named axes into steps along groups of ranks.

    A dry one makes no group, which ranks do together: it serves for checks before they have agreed.
    """

    def __init__(self, group: Group, is_dry: bool = False) -> None:
        self.group, self.is_dry = group, is_dry

    def team(self, axes: Iterable[str]) -> Group | None:
        """The ranks along some axes; None for no axis."""
        axes = tuple(axes)
        if not axes:
            return None
        if self.is_dry:
            if self.group.mesh is not None:
                self.group.mesh.refuse_unknown(axes, PlanError)
            return self.group
        return team_along(self.group, axes, PlanError)

    def move(self, steps: Iterable[Change], sizes: Mapping[Axes, tuple[int, ...]] | None = None) -> Move:
        """The steps along the groups; `sizes` are the stretches of the last dim where a weight tells them."""
        found = (self._step(step, sizes or {}) for step in steps)
        return tuple(step for step in found if step.team.size > 1 or self.is_dry)

    def _step(self, step: Change, sizes: Mapping[Axes, tuple[int, ...]]) -> Step:
        team = self.team(step.axes)
        assert team is not None
        if step.kind == "sum_gradient":
            return SumGradient(team)
        if step.kind == "sum":
            return Sum(team)
        cut = step.cut
        assert cut is not None
        mesh = self.group.mesh
        if mesh is not None and tuple(name for name in mesh.names if name in step.axes) != step.axes:
            ordered = "*".join(name for name in mesh.names if name in step.axes)
            raise PlanError(
                f"`{cut}` cannot be cut or joined on the way: its axes are not in the order of the mesh",
                {"mesh": str(mesh)},
                f"write `{ordered}`, or let the value pass as it is",
            )
        known = sizes.get(step.axes) if step.dim == -1 else cut.sizes
        if known is None and cut.pad is not None:
            raise PlanError(f"`{cut}` is padded: its true length is not known here", fix="let the value pass as it is")
        stretches = Stretches(step.dim, known, cut.balanced)
        if step.kind == "gather":
            return Gather(team, stretches, step.sums)
        return SumScatter(team, stretches) if step.kind == "sum_scatter" else Take(team, stretches)


# -- one layer ---------------------------------------------------------------------------------------------------------


def addend_axes(module: nn.Module, stated: Stated, tensors: Tensors) -> Axes:
    """The axes along which a layer leaves the gradient of its input as an addend."""
    if layer_class(type(module)) is None or isinstance(module, nn.Embedding):
        return ()
    declared = stated.out.addends if stated.out is not None else ()
    if "out" not in (dim_names(module, "weight") or ()):
        return declared
    return union(tensors.cut(module, "weight", "out"), declared)


def layer_flow(module: nn.Module, stated: Stated, tensors: Tensors, binder: Binder, is_inside: bool) -> LayerFlow:
    """What a layer of a known class does.

    Args:
        is_inside: a module around it has an `in`, which sums the gradients of its inputs.

    Raises:
        PlanError: the flows contradict the layer's tensors.
    """
    kind = kind_named("Embedding" if isinstance(module, nn.Embedding) else type(module).__name__)
    assert kind is not None, "a layer that has a parallel one is of a known kind"
    if stated.others:
        raise PlanError(f"a layer has one result, no `out {next(iter(stated.others))}`", fix="write `out` alone")
    if kind.name == "embedding":
        return _embedding(module, stated, tensors, binder)
    if kind.name == "norm":
        return _norm(module, stated, tensors, binder)
    return _linear(module, stated, tensors, binder, is_inside)


def _linear(module: Any, stated: Stated, tensors: Tensors, binder: Binder, is_inside: bool) -> LayerFlow:
    out_axes = tensors.cut(module, "weight", "out")
    in_axes = tensors.cut(module, "weight", "in")
    enters = _the_one_in(stated)
    came = enters if enters is not None else _natural(in_axes)
    leaves = stated.out if stated.out is not None else _natural(out_axes, in_axes)
    _same("in", came, came.after, in_axes, (), _weight(module, tensors))
    _same("out", leaves, leaves.before, out_axes, in_axes, _weight(module, tensors))
    addends = addend_axes(module, stated, tensors)
    sizes = {}
    for axes, dim in ((out_axes, "out"), (in_axes, "in")):
        if axes:
            sizes[axes] = stretches_of(module, tensors, dim)
    own = enters is not None or not is_inside
    enter = changes(attrs.evolve(came, addends=()), addends if own else ())
    leave = changes(attrs.evolve(leaves, addends=()))
    stream = tuple(axis for dim, cut in cuts(came.after).items() if dim != -1 for axis in cut.axes)
    sums = union(stream, leaves.addends)
    start, sums_bias, adds_bias = None, sums, True
    if module.bias is not None:
        bias_axes = tensors.cut(module, "bias", "out")
        if in_axes:
            left = tuple(axis for axis in cut_axes(leaves.after) if axis not in out_axes)
            kept = partial_axes(leaves.after)
            sums_bias = union(left, kept, leaves.addends)
            team = binder.team(kept)
            adds_bias = team is None or team.index == 0
        if bias_axes and bias_axes != out_axes:
            raise PlanError(
                "the bias is cut over other axes than the weight",
                {"weight": str(tensors.specs["weight"]), "bias": str(tensors.specs["bias"])},
                "cut the bias as the weight's `out` is cut, or leave it whole",
            )
        if out_axes and not bias_axes:
            layout = tensors.layouts["weight"]
            d = _dim(module, "out")
            assert isinstance(layout, CutLayout)
            if layout.is_blocked(d):
                raise PlanError(
                    "a weight cut in blocks goes with a bias cut alike",
                    {"weight": str(tensors.specs["weight"])},
                    f"shard the bias, too: `bias: {tensors.specs['weight']}`",
                )
            start = layout.start(binder.group.rank, d)
            sums_bias = union(sums_bias, out_axes)
    flow = LayerFlow(
        binder.move(enter, sizes),
        binder.move(leave, sizes),
        sums=binder.team(sums),
        sums_bias=binder.team(sums_bias),
        start=start,
        adds_bias_last=bool(in_axes),
        adds_bias=adds_bias,
        is_transposed=type(module).__name__ == "Conv1D",
    )
    if start is not None and isinstance(flow.enter[0] if flow.enter else None, SumGradient) and sums_bias == out_axes:
        return fused(attrs.evolve(flow, sums_bias=None))  # the bias's gradient travels with the input's
    return flow if start is not None else fused(flow)


def _embedding(module: Any, stated: Stated, tensors: Tensors, binder: Binder) -> LayerFlow:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise PlanError(
                f"an embedding with {option} takes no flow",
                fix="leave out its `in` and `out`: ShardedTensors pass then",
            )
    rows = tensors.cut(module, "weight", "vocab")
    columns = tensors.cut(module, "weight", "embed")
    leaves = stated.out if stated.out is not None else _natural(columns, rows)
    _same("out", leaves, leaves.before, columns, rows, _weight(module, tensors))
    came = _the_one_in(stated) or REPLICATE
    start = None
    if rows:
        layout = tensors.layouts["weight"]
        assert isinstance(layout, CutLayout)
        if layout.is_blocked(0):
            raise PlanError("a vocabulary in blocks takes no flow", {"weight": str(tensors.specs["weight"])})
        start = layout.start(binder.group.rank, 0)
    sizes = {columns: stretches_of(module, tensors, "embed")} if columns else {}
    sums = binder.team(union(cut_axes(came.after), leaves.addends))
    leave = binder.move(changes(attrs.evolve(leaves, addends=())), sizes)
    return LayerFlow(binder.move(changes(came)), leave, sums=sums, start=start)


def _norm(module: Any, stated: Stated, tensors: Tensors, binder: Binder) -> LayerFlow:
    for name in module._parameters:
        if tensors.cut(module, name, "embed"):
            raise PlanError("a norm with a flow has whole parameters", {name: str(tensors.specs[name])}, "`replicate`")
    came = _the_one_in(stated) or REPLICATE
    leaves = stated.out or Flow(came.after, came.after)
    if len(module.__dict__.get("normalized_shape", ())) > 1 or last_cut(came.after) is not None:
        raise PlanError("a norm takes whole last dims", {"in": str(came)}, "cut the stream along another dim")
    if leaves.before != came.after:
        raise PlanError("a norm gives what it takes", {"in": str(came), "out": str(leaves)}, f"`out: {came.after}`")
    sums = binder.team(union(cut_axes(came.after), leaves.addends))
    enter = changes(attrs.evolve(came, addends=()), came.addends)
    return LayerFlow(binder.move(enter), binder.move(changes(attrs.evolve(leaves, addends=()))), sums=sums)


def _the_one_in(stated: Stated) -> Flow | None:
    named = [name for name in stated.ins if name is not None]
    if named:
        raise PlanError(f"a layer has one input, not `{named[0]}`", fix="write `in` alone")
    return stated.ins.get(None)


def _natural(cut_axes: Axes, partial: Axes = ()) -> Flow:
    """What a layer takes or gives when nothing is said: cut as its weight is, addends summed at once."""
    after = natural_layout(cut_axes)
    return Flow(after.partial(*partial) if partial else after, after)


def natural_layout(cut_axes: Axes) -> Spec:
    """The layout of a value whose last dim is cut over some axes."""
    return Spec(..., cut_axes) if cut_axes else Replicate()


def _weight(module: Any, tensors: Tensors) -> str:
    return f"{' x '.join(map(str, module.weight.shape))} as {tensors.specs.get('weight', 'it is, whole')}"


def _same(side: str, flow: Flow, met: Spec, last: Axes, partial: Axes, weight: str) -> None:
    """Refuse a flow whose side that meets the weight contradicts the weight's layout."""
    found = last_cut(met)
    axes = found.axes if found is not None else ()
    if axes == last and partial_axes(met) == partial:
        return
    wanted = str(Spec(..., last)) if last else "replicate"
    wanted = f"partial({'*'.join(partial)})" if partial and not last else wanted
    raise PlanError(
        f"`{side}` contradicts the layout of `weight`",
        {side: str(flow), "weight": weight},
        f"write `{side}: {wanted}{' -> replicate' if partial else ''}`",
    )


def _dim(module: nn.Module, dim: str) -> int:
    names = dim_names(module, "weight")
    assert names is not None
    return names.index(dim)


def stretches_of(module: nn.Module, tensors: Tensors, dim: str) -> tuple[int, ...]:
    """The true stretch of each piece of a weight's dim."""
    layout = tensors.layouts["weight"]
    assert isinstance(layout, CutLayout)
    cut = layout.dims[_dim(module, dim)]
    assert cut is not None
    count = 1
    for axis in cut.axes:
        count *= layout.grid[axis]
    return tuple(cut.pieces.size(i) for i in range(count))
