"""A plan matched to a model: one layout a tensor, the flows of each module, the findings; and it as one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from shardtensor.layout.layout import Layout
from shardtensor.mesh import ranks_text
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.line import Hook, Line
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.spec.devices import ChunkShardingSpec, GridShardingSpec
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parts import Flat


@attrs.frozen(eq=False)
class Placed:
    """One tensor and how it lies, under one of its names.

    Attributes:
        spec: while computing, in the axes of the plan as they were written; names of dims filled in by position.
        layout: `spec` bound to the plan's mesh (`Axes.mesh`, factors spelled out) and the shape.
        stored: what `store` keeps of it on a rank, cut over these axes; None: kept as it computes.
        unit: the path of the module whose parameters are gathered together with it; None where `stored` is None.
        line: what said so; None for one that fell to `unmatched`.
        tied_to: the name whose layout it takes, by `tie`.
    """

    tensor: TensorInfo
    spec: ShardingSpec
    layout: Layout
    stored: Flat | None = None
    unit: str | None = None
    line: Line | None = None
    tied_to: str = ""


@attrs.frozen(eq=False)
class Passing:
    """How values pass one module.

    Attributes:
        ins: by the name of the argument, empty for the first: the flow and the line that said it.
        outs: by the name or position of the result, empty for the first.
        uses: hooks, in order.
        locals: attribute -> a one-dim spec.
    """

    ins: Mapping[str, tuple[Flow, Line]] = attrs.field(factory=dict)
    outs: Mapping[str, tuple[Flow, Line]] = attrs.field(factory=dict)
    uses: tuple[tuple[Hook, Line], ...] = ()
    locals: Mapping[str, tuple[Any, Line]] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Resolved:
    """A plan that was matched to a model; with errors among its findings it is only good for showing them.

    Attributes:
        tensors: by name, in the order of the model; those that could not be placed are missing.
        modules: by path, only those of which the plan says something.
    """

    plan: Plan
    model: Model
    tensors: Mapping[str, Placed]
    modules: Mapping[str, Passing]
    findings: tuple[Finding, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")


def canonical_lines(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """The mesh, then each tensor: its name; and its dtype and true shape, how it lies, and on which ranks.

    Equal for equal plans, however they were written: styles, fallbacks, order and numbers by name are gone.

    Example:
        >>> from shardtensor.plan.models.model import Model, TensorInfo
        >>> from shardtensor.plan.plan import Plan
        >>> from shardtensor.layout.bind import bind
        >>> plan = Plan.from_rules({"up.weight": "[tp, -]"}, "dp=2, tp=2", data="dp")
        >>> tensor, spec = TensorInfo("up.weight", (8, 4)), plan.lines[0].value
        >>> placed = Placed(tensor, spec, bind(spec, (8, 4), plan.axes.mesh))
        >>> list(canonical_lines(Resolved(plan, Model((tensor,)), {"up.weight": placed}, {})))
        [('mesh (dp=2, tp=2), data dp', ''), ('up.weight', 'float32 8 x 4  [tp, -]  ranks 0-3')]
    """
    axes = resolved.plan.axes
    data = f", data {'*'.join(axes.leaves(axes.data))}" if axes.data else ""
    yield f"mesh {axes.mesh}{data}", ""
    for placed in sorted(resolved.tensors.values(), key=lambda placed: placed.tensor.name):
        tensor = placed.tensor
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        kind = f"{tensor.dtype} {shape}" + (" buffer" if tensor.is_buffer else "")
        yield tensor.name, "  ".join([kind, layout_text(placed, resolved), _devices_text(placed)])


def layout_text(placed: Placed, resolved: Resolved) -> str:
    """How a tensor lies: in the axes of the mesh, dims by position, with what `store` keeps of it and where."""
    spec, axes, stored = placed.spec, resolved.plan.axes, placed.stored
    if isinstance(spec, Spec):
        spec = Spec() if placed.layout.is_replicated else axes.spelled(spec)
    if stored is None:
        return str(spec)
    flat = axes.spelled(Spec().flat(*stored.axes, unit=stored.unit)).flat_part
    return f"{spec} {flat} by {placed.unit or 'the root'}"


def _devices_text(placed: Placed) -> str:
    """The ranks that hold some of a tensor, and their devices where its spec names them."""
    spec = placed.spec
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        return ", ".join(map(str, spec.placements.runs))
    return f"ranks {ranks_text(placed.layout.ranks)}"
