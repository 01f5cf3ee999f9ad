"""The change of each module with flows: the class that it gets, or the hooks that redistribute its values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs
from torch import nn

from shardtensor.comm.group import Group, group_along
from shardtensor.comm.redistribute import Move, move_along
from shardtensor.errors import PlanError
from shardtensor.layout.layout import MeshLayout
from shardtensor.layout.route import DimStep
from shardtensor.parallel.flow_hooks import FlowHook, FlowPreHook, Result, Wrapping, arguments
from shardtensor.parallel.layers import LayerFlow, Moves, ParallelLayer, fused, layer_class
from shardtensor.plan.flows.flow import Axes, Flow, cuts, flow_route, partial_axes
from shardtensor.plan.flows.gradients import Flows
from shardtensor.plan.flows.layer_flows import LayerWork, layer_work
from shardtensor.plan.flows.modules import Layer, StatedFlows
from shardtensor.spec.nodes import Cut, Spec

Sizes = Mapping[Axes, tuple[int, ...]]
"""The sizes of the last dim of a value, by the axes that shard it, if a weight determines them."""


class Binder:
    """Binds the steps of flows to groups of ranks.

    A dry one makes no group, because ranks make groups together: it is for checks before they have agreed.
    """

    def __init__(self, group: Group, is_dry: bool = False) -> None:
        self.group, self.is_dry = group, is_dry

    def group_along(self, axes: Iterable[str]) -> Group | None:
        """Return the group along some axes; None for no axis."""
        axes = tuple(axes)
        if not axes:
            return None
        if self.is_dry:
            if self.group.mesh is not None:
                self.group.mesh.refuse_unknown(axes, PlanError)
            return self.group
        return group_along(self.group, axes, PlanError)

    def moves(self, steps: Iterable[DimStep], sizes: Sizes | None = None) -> Moves:
        """Return the steps along the groups."""
        found = (self._move(step, sizes or {}) for step in steps)
        return tuple(move for move in found if move.subgroup.size > 1 or self.is_dry)

    def _move(self, step: DimStep, sizes: Sizes) -> Move:
        subgroup, cut, mesh = self.group_along(step.axes), step.cut, self.group.mesh
        assert subgroup is not None
        if cut is None:  # a sum keeps its shape
            return move_along(step, subgroup)
        if mesh is not None and tuple(name for name in mesh.names if name in step.axes) != step.axes:
            ordered = "*".join(name for name in mesh.names if name in step.axes)
            raise PlanError(
                f"`{cut}` cannot be cut or joined on the way: its axes are not in the order of the mesh",
                {"mesh": str(mesh)},
                f"write `{ordered}`, or let the value pass as it is",
            )
        if step.dim == -1 and step.axes in sizes:
            step = attrs.evolve(step, cut=Cut(step.axes, sizes=sizes[step.axes]))
        elif cut.sizes is None and cut.pad is not None:
            raise PlanError(f"`{cut}` is padded: its true length is not known here", fix="let the value pass as it is")
        return move_along(step, subgroup)


def _layer_flow(module: Any, layer: Layer, work: LayerWork, binder: Binder, rank: int) -> LayerFlow:
    """Return the flow of a layer of a known class; `rank` is this rank's number in the mesh of the plan."""
    if layer.kind.name == "embedding":
        return _embedding(module, layer, work, binder, rank)
    if layer.kind.name == "linear":
        return _linear(module, layer, work, binder, rank)
    if len(module.__dict__.get("normalized_shape", ())) > 1:
        raise PlanError("a norm over several dims takes no flow", {"normalized_shape": module.normalized_shape})
    return LayerFlow(binder.moves(work.enter), binder.moves(work.leave), sums=binder.group_along(work.sums["weight"]))


def _linear(module: Any, layer: Layer, work: LayerWork, binder: Binder, rank: int) -> LayerFlow:
    out_axes, in_axes = layer.cut("weight", "out"), layer.cut("weight", "in")
    start, adds_bias = None, True
    if module.bias is not None:
        if in_axes:
            subgroup = binder.group_along(partial_axes(work.leaves.after))
            adds_bias = subgroup is None or subgroup.index == 0
        if out_axes and not layer.cut("bias", "out"):
            start = _start(layer, "out", rank)
    flow = LayerFlow(
        binder.moves(work.enter, _sizes(layer, "in")),
        binder.moves(work.leave, _sizes(layer, "out")),
        sums=binder.group_along(work.sums["weight"]),
        sums_bias=None if work.sums_beside else binder.group_along(work.sums.get("bias", ())),
        start=start,
        adds_bias_last=bool(in_axes),
        adds_bias=adds_bias,
        is_transposed=type(module).__name__ == "Conv1D",
    )
    return fused(flow) if work.sums_beside or start is None else flow


def _embedding(module: Any, layer: Layer, work: LayerWork, binder: Binder, rank: int) -> LayerFlow:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise PlanError(
                f"an embedding with {option} takes no flow",
                fix="leave out its `in` and `out`: ShardedTensors pass then",
            )
    start = _start(layer, "vocab", rank) if layer.cut("weight", "vocab") else None
    leave = binder.moves(work.leave, _sizes(layer, "embed"))
    return LayerFlow(binder.moves(work.enter), leave, sums=binder.group_along(work.sums["weight"]), start=start)


def _start(layer: Layer, dim: str, rank: int) -> int:
    """Return where a rank's range of a dim of the weight starts."""
    layout, d = _cut(layer, dim)
    return layout.start(rank, d)


def _sizes(layer: Layer, dim: str) -> Sizes:
    axes = layer.cut("weight", dim)
    return {axes: dim_sizes_of(layer, dim)} if axes else {}


def dim_sizes_of(layer: Layer, dim: str) -> tuple[int, ...]:
    """Return the size of each piece of a weight's dim, without padding."""
    layout, d = _cut(layer, dim)
    cut = layout.dims[d]
    assert cut is not None
    return tuple(cut.pieces.size(i) for i in range(cut.pieces.count))


def _cut(layer: Layer, dim: str) -> tuple[MeshLayout, int]:
    layout = layer.params["weight"].layout
    assert isinstance(layout, MeshLayout)
    return layout, layer.kind.dims["weight"].index(dim)


@attrs.frozen(eq=False)
class ModuleChange:
    """The change of one module.

    Attributes:
        path: its path in the plan.
        cut: names of its parameters that are sharded.
    """

    path: str
    module: nn.Module
    layer: LayerFlow | None = None
    cut: frozenset[str] = frozenset()
    pre_hook: FlowPreHook | None = None
    post_hook: FlowHook | None = None

    def apply(self, handles: str) -> None:
        """Change the module's class, or set its hooks; the handles of hooks are kept in the attribute `handles`."""
        module: Any = self.module
        if self.layer is not None:
            kind = type(module)
            made = layer_class(kind)
            assert made is not None
            module.flow, module.flow_cut, module.flow_of = self.layer, self.cut, kind
            module.__class__ = made
        kept = module.__dict__.setdefault(handles, []) if self.pre_hook or self.post_hook else []
        if self.pre_hook is not None:
            kept.append(module.register_forward_pre_hook(self.pre_hook, with_kwargs=True))
        if self.post_hook is not None:
            kept.append(module.register_forward_hook(self.post_hook))


def restore_class(module: Any) -> None:
    """Restore a layer's own class."""
    if isinstance(module, ParallelLayer):
        module.__class__ = module.flow_of  # type: ignore[assignment]
        del module.flow, module.flow_cut, module.flow_of


def module_changes(
    modules: Mapping[str, nn.Module],
    flows: Flows,
    sharded: Mapping[str, frozenset[str]],
    binder: Binder,
    plain_layers: Collection[str] = (),
) -> list[ModuleChange]:
    """Return the changes of modules with a flow and of `plain_layers`: layers without one, that use plain values."""
    stated = flows.modules.stated
    found: list[ModuleChange] = []
    first_paths: dict[int, str] = {}
    for path in (*(path for path, each in stated.items() if each.ins or each.outs), *plain_layers):
        module, flow = modules[path], stated.get(path, StatedFlows())
        first = first_paths.setdefault(id(module), path)
        if first == path:
            try:
                found.append(_module_change(path, module, flows, sharded.get(path, frozenset()), binder))
            except PlanError as error:
                fault, *facts = str(error).splitlines()
                raise PlanError("\n".join([f"{path or type(module).__name__}: {fault}", *facts])) from None
        elif stated.get(first, StatedFlows()).written != flow.written:  # one module under two names
            raise PlanError(
                f"{first} and {path} are one module, and the plan has different flows for them",
                {first: _text(stated.get(first, StatedFlows()).written), path: _text(flow.written)},
                "give both the same",
            )
    return found


def _module_change(path: str, module: nn.Module, flows: Flows, sharded: frozenset[str], binder: Binder) -> ModuleChange:
    layer, stated = flows.modules.layers.get(path), flows.modules.stated.get(path, StatedFlows())
    if layer is not None and layer_class(type(module)) is not None:
        work = flows.works.get(path) or layer_work(layer, flows.modules.nearest_in(path) is not None)
        rank = flows.modules.axes.mesh.ranks[binder.group.index]
        return ModuleChange(path, module, _layer_flow(module, layer, work, binder, rank), sharded)
    has_tensors = bool(sharded) and flows.modules.computes_on_sharded(path)
    if has_tensors:
        stated = _of_sharded(stated)
    return _container(path, module, stated, flows.sums.partials.get(path, ()), binder, has_tensors)


def _text(flows: Mapping[str, Flow]) -> str:
    return ", ".join(f"{side}: {flow}" for side, flow in flows.items())


def _container(
    path: str, module: nn.Module, stated: StatedFlows, partials: Axes, binder: Binder, has_tensors: bool
) -> ModuleChange:
    names = arguments(module)
    moves, wraps = {}, {}
    for side, flow in stated.ins.items():
        name = side or next(iter(names), "")
        if name not in names:
            raise PlanError(
                f"forward has no argument `{name}`", {"arguments": ", ".join(names)}, "name one of them, or write `in`"
            )
        moves[name] = binder.moves(flow_route(flow, () if has_tensors else partials))
        if has_tensors and cuts(flow.after):
            slices = tuple(
                (subgroup, DimStep("all_gather", cut.axes, dim, cut))
                for dim, cut in cuts(flow.after).items()
                if (subgroup := binder.group_along(cut.axes)) is not None
            )
            wraps[name] = Wrapping(flow.after, slices, binder.group)
    pre_hook = None
    if wraps or any(moves.values()):  # a hook that does nothing would cost each call some microseconds
        pre_hook = FlowPreHook(moves, names, wraps, bool(partials) and not has_tensors)
    results = (
        (name, binder.moves(flow_route(flow)), flow.before if has_tensors else None)
        for name, flow in stated.outs.items()
    )
    found = {name: Result(move, takes_from) for name, move, takes_from in results if move or takes_from is not None}
    post_hook = FlowHook(found) if found else None
    return ModuleChange(path, module, pre_hook=pre_hook, post_hook=post_hook)


def _of_sharded(stated: StatedFlows) -> StatedFlows:
    """Return the flows of a module that works on ShardedTensors: it returns sums where a layer returns partial sums."""

    def summed(flow: Flow) -> Flow:
        before = flow.before
        bare = Spec.of(before.dims, before.named, before.flat_part, before.only_part)
        return attrs.evolve(flow, before=bare) if before.partial_parts else flow

    return attrs.evolve(stated, outs={name: summed(flow) for name, flow in stated.outs.items()})
