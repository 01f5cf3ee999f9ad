"""A plan: how the tensors of a model lie on a mesh and how values pass its modules, before any model is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from shardtensor.plan.axes import Axes
from shardtensor.plan.finding import Finding
from shardtensor.plan.line import Dims, Line, Store, Tie, Unmatched
from shardtensor.spec.diagnostics import Source


@attrs.frozen(eq=False)
class Plan:
    """What a plan file says, for one configuration and world: every number known, every style spelled out.

    Attributes:
        axes: its mesh.
        lines: what is said of tensors and modules; their order does not decide.
        stores, ties, dims, unmatched: the other statements.
        params: the parameters, with the values they have; `config` and `world` it was read for.
        sources: every text that was read, the plan's own file first.
        findings: what reading found that is no error: an ``else`` side that was taken (N001).
    """

    axes: Axes
    lines: tuple[Line, ...] = ()
    stores: tuple[Store, ...] = ()
    ties: tuple[Tie, ...] = ()
    dims: tuple[Dims, ...] = ()
    unmatched: Unmatched | None = None
    params: Mapping[str, Any] = attrs.field(factory=dict)
    config: Mapping[str, Any] = attrs.field(factory=dict)
    world: int = 1
    sources: tuple[Source, ...] = ()
    findings: tuple[Finding, ...] = ()
