"""From what the plan's flows say that a layer does to steps along groups of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardtensor.comm.along_dim import DimSizes
from shardtensor.comm.group import Group, group_along
from shardtensor.errors import PlanError
from shardtensor.layout.layout import CutLayout
from shardtensor.parallel.layers import LayerFlow, Move, Step, fused, step_of
from shardtensor.plan.flows.flow import Axes, Change, partial_axes
from shardtensor.plan.flows.layer_flows import LayerWork
from shardtensor.plan.flows.modules import Layer

Sizes = Mapping[Axes, tuple[int, ...]]
"""The stretches of the last dim of a value, by the axes over which it is cut, where a weight tells them."""


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
        return group_along(self.group, axes, PlanError)

    def move(self, steps: Iterable[Change], sizes: Sizes | None = None) -> Move:
        """The steps along the groups."""
        found = (self._step(step, sizes or {}) for step in steps)
        return tuple(step for step in found if step.team.size > 1 or self.is_dry)

    def _step(self, step: Change, sizes: Sizes) -> Step:
        team = self.team(step.axes)
        assert team is not None
        cut = step.cut
        if cut is None:  # what is summed stays of one shape
            return step_of(step.kind, team)
        mesh = self.group.mesh
        if mesh is not None and tuple(name for name in mesh.names if name in step.axes) != step.axes:
            ordered = "*".join(name for name in mesh.names if name in step.axes)
            raise PlanError(
                f"`{cut}` cannot be cut or joined on the way: its axes are not in the order of the mesh",
                {"mesh": str(mesh)},
                f"write `{ordered}`, or let the value pass as it is",
            )
        known = sizes.get(step.axes, cut.sizes) if step.dim == -1 else cut.sizes
        if known is None and cut.pad is not None:
            raise PlanError(f"`{cut}` is padded: its true length is not known here", fix="let the value pass as it is")
        return step_of(step.kind, team, DimSizes(step.dim, known, cut.balanced), step.sums)


def layer_flow(module: Any, layer: Layer, work: LayerWork, binder: Binder, rank: int) -> LayerFlow:
    """What a layer of a known class does.

    Args:
        work: what the plan's flows say that it does, free of contradictions.
        rank: this one, as the mesh of the plan counts.

    Raises:
        PlanError: it is set to do more than such a layer does.
    """
    if layer.kind.name == "embedding":
        return _embedding(module, layer, work, binder, rank)
    if layer.kind.name == "norm":
        return _norm(module, work, binder)
    return _linear(module, layer, work, binder, rank)


def _linear(module: Any, layer: Layer, work: LayerWork, binder: Binder, rank: int) -> LayerFlow:
    out_axes, in_axes = layer.cut("weight", "out"), layer.cut("weight", "in")
    start, adds_bias = None, True
    if module.bias is not None:
        if in_axes:
            team = binder.team(partial_axes(work.leaves.after))
            adds_bias = team is None or team.index == 0
        if out_axes and not layer.cut("bias", "out"):
            start = _start(layer, "out", rank)
    flow = LayerFlow(
        binder.move(work.enter, _stretches(layer, "in")),
        binder.move(work.leave, _stretches(layer, "out")),
        sums=binder.team(work.sums["weight"]),
        sums_bias=None if work.sums_beside else binder.team(work.sums.get("bias", ())),
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
    leave = binder.move(work.leave, _stretches(layer, "embed"))
    return LayerFlow(binder.move(work.enter), leave, sums=binder.team(work.sums["weight"]), start=start)


def _norm(module: nn.Module, work: LayerWork, binder: Binder) -> LayerFlow:
    if len(module.__dict__.get("normalized_shape", ())) > 1:
        raise PlanError("a norm over several dims takes no flow", {"normalized_shape": module.normalized_shape})
    return LayerFlow(binder.move(work.enter), binder.move(work.leave), sums=binder.team(work.sums["weight"]))


def _start(layer: Layer, dim: str, rank: int) -> int:
    """Where a rank's stretch of a dim of the weight starts."""
    layout, d = _cut(layer, dim)
    return layout.start(rank, d)


def _stretches(layer: Layer, dim: str) -> Sizes:
    axes = layer.cut("weight", dim)
    return {axes: stretches_of(layer, dim)} if axes else {}


def stretches_of(layer: Layer, dim: str) -> tuple[int, ...]:
    """The true stretch of each piece of a weight's dim."""
    layout, d = _cut(layer, dim)
    cut = layout.dims[d]
    assert cut is not None
    return tuple(cut.pieces.size(i) for i in range(cut.pieces.count))


def _cut(layer: Layer, dim: str) -> tuple[CutLayout, int]:
    layout = layer.params["weight"].layout
    assert isinstance(layout, CutLayout)
    return layout, layer.kind.dims["weight"].index(dim)
