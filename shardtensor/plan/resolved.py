"""A plan matched to a model: one layout a tensor, the flows of each module, and what was found wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from shardtensor.layout.layout import Layout
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.line import Hook, Line
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.spec.nodes import ShardingSpec
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
