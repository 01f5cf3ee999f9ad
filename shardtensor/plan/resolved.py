"""A plan matched to a model: one layout for each tensor, the flows of each module, the findings; and its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from shardtensor.layout.html import html_table
from shardtensor.layout.layout import Layout
from shardtensor.mesh import ranks_text
from shardtensor.plan.findings.brief import brief_names
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
    """One tensor and its layout, under one of its names.

    Attributes:
        spec: in the computation, in the axes of the plan as they were written; dims by position instead of names.
        layout: `spec` bound to the plan's mesh (`Axes.mesh`, in factors) and the shape.
        stored: the flat sharding of its `store`; None: stored as in the computation.
        unit: the path of the module whose parameters are gathered together with it; None if `stored` is None.
        line: its rule; None if it has the layout of `unmatched`.
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
class ModuleFlows:
    """How values pass one module.

    Attributes:
        ins: by the name of the argument, empty for the first: the flow and its line.
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
    """A plan that was matched to a model; if its findings have errors, use it only to show them.

    Attributes:
        tensors: by name, in the order of the model; those that could not be placed are missing.
        modules: by path, only those with rules.
    """

    plan: Plan
    model: Model
    tensors: Mapping[str, Placed]
    modules: Mapping[str, ModuleFlows]
    findings: tuple[Finding, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def _repr_html_(self) -> str:
        """Return the layouts of its tensors as a table, for notebooks; equal ones of several layers in one row."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, placed in self.tensors.items():
            shape = " x ".join(map(str, placed.tensor.shape)) or "scalar"
            text = f"{placed.spec} {placed.stored or ''}".strip()
            alike.setdefault((shape, placed.tensor.dtype, text), []).append(name)
        rows = [(", ".join(brief_names(names)), *facts) for facts, names in alike.items()]
        title = f"{len(self.tensors)} tensors on {self.plan.axes.mesh}, {len(self.errors)} errors"
        return html_table(title, ("tensors", "shape", "dtype", "layout"), rows)


def canonical_lines(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """Yield the mesh, then each tensor: its name; and its dtype, global shape, layout and ranks.

    Equal for equal plans, however they were written: without styles, fallbacks, order and names of numbers.

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
    """Return the layout of a tensor as text: in the axes of the mesh, dims by position, with its store and unit."""
    spec, axes, stored = placed.spec, resolved.plan.axes, placed.stored
    if isinstance(spec, Spec):
        spec = Spec() if placed.layout.is_replicated else axes.spelled(spec)
    if stored is None:
        return str(spec)
    flat = axes.spelled(Spec().flat(*stored.axes, unit=stored.unit)).flat_part
    return f"{spec} {flat} by {placed.unit or 'the root'}"


def _devices_text(placed: Placed) -> str:
    """Return the ranks that hold parts of a tensor as text, with their devices if its spec names them."""
    spec = placed.spec
    if isinstance(spec, ChunkShardingSpec | GridShardingSpec):
        return ", ".join(map(str, spec.placements.runs))
    return f"ranks {ranks_text(placed.layout.ranks)}"
