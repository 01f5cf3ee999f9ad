"""A plan: rules for the layouts of a model's tensors and the flows of its modules, before it is matched to a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from shardtensor.layout.html import html_table
from shardtensor.mesh import Mesh
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.line import Dims, Line, Store, Tie, Unmatched
from shardtensor.plan.python_rules import read_axes, statements
from shardtensor.spec.diagnostics import Source


@attrs.frozen(eq=False)
class Plan:
    """The rules of a plan file for one configuration and world, with all numbers computed and all styles expanded.

    Attributes:
        axes: its mesh.
        lines: the rules for tensors and modules; their order does not matter.
        stores, ties, dims, unmatched: the other statements.
        params: the values of the parameters; also `config` and `world`, for which the plan was read.
        sources: every text that was read, the plan's own file first.
        findings: notes of the reader: an ``else`` side that is used (N001).
        is_part: whether tensors without a rule stay unchanged; if False, each tensor needs a rule.
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
    is_part: bool = False

    @classmethod
    def from_rules(
        cls,
        rules: Mapping[str, Any],
        mesh: str | Mesh,
        data: str | tuple[str, ...] = (),
        config: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Return the plan of these rules, equal to that of a file with the same lines.

        Args:
            rules: a pattern to a layout, or to a block of rules for names below it. In a block ``"in"``, ``"in NAME"``,
                ``"out"``, ``"out NAME"`` are flows, ``"local NAME"`` an attribute that counts, ``"use"`` the call of a
                hook, or several. ``optional`` is allowed before a pattern. At the top ``"store **"``, ``"tie A"`` and
                ``"unmatched"`` mean the same as in a file. Styles are functions that return blocks.
            mesh: ``"dp=2, tp=4"``; an axis may be made of factors, ``"dp=2, tp(kvg=2, kvr=2)"``.
            data: the axes along which samples differ.
            config: the configuration of the model, from which a file would read its values.

        Raises:
            PlanError, SpecError: a key or a value cannot be read.

        Example:
            >>> plan = Plan.from_rules({"mlp.up": {"weight": "[tp, -]", "out": "[..., tp]"}}, "dp=2, tp=4", data="dp")
            >>> plan.world, [f"{line.pattern} {line.kind}: {line.value}" for line in plan.lines]
            (8, ['mlp.up.weight tensor: [tp, -]', 'mlp.up out: [..., tp]'])
        """
        axes = read_axes(mesh, data)
        return cls(axes, **statements(rules), config=config or {}, world=axes.mesh.size)

    def _repr_html_(self) -> str:
        """Return its rules as a table, for notebooks."""
        rows: list[tuple[Any, ...]] = [(line.pattern, line.kind, line.value) for line in self.lines]
        rows += [(store.pattern, "store", store.flat or "replicate") for store in self.stores]
        return html_table(f"{len(self.lines)} rules for {self.axes.mesh}", ("name", "kind", "value"), rows)
