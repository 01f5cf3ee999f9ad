"""What a line says of one tensor, bound to its shape and the mesh of the plan; what does not fit is a finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from shardtensor.errors import LayoutError, SpecError
from shardtensor.layout.bind import bind
from shardtensor.layout.cutting import positional
from shardtensor.layout.layout import Layout
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.line import Line
from shardtensor.plan.match.misfit import misfit
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.spec.nodes import ShardingSpec, Spec
from shardtensor.spec.parse import as_spec


@attrs.frozen(eq=False)
class Bound:
    """A spec by position, and its layout; no layout where the error says why."""

    spec: ShardingSpec
    layout: Layout | None = None
    error: LayoutError | SpecError | None = None


class Binder:
    """Binds the layouts of a plan to the tensors of a model; equal ones once."""

    def __init__(self, plan: Plan, model: Model, tree: NameTree) -> None:
        self._plan = plan
        self._model = model
        self._said = {name: said.names for said in plan.dims for name in tree.tensors(said.pattern)}
        self._kept: dict[object, Bound] = {}
        self._dims: dict[str, tuple[str, ...] | None] = {}

    def dims(self, info: TensorInfo) -> tuple[str, ...] | None:
        """The names of a tensor's dims: its own, those of a ``dims`` line, or those of its type of layer."""
        if info.dims is not None:
            return info.dims
        if info.name not in self._dims:
            path, _, leaf = info.name.rpartition(".")
            kind = self._model.kind(path)
            found = self._said.get(info.name) or (kind.dims.get(leaf) if kind is not None else None)
            fits = found is not None and len(found) == len(info.shape)
            self._dims[info.name] = found if fits else None
        return self._dims[info.name]

    def bound(self, value: Any, info: TensorInfo, only: tuple[str, int] | None = None) -> Bound | None:
        """What a value of a line comes to for a tensor; None where it is no spec (it shards modules itself)."""
        if not isinstance(value, ShardingSpec | str):
            return None
        dims = self.dims(info)
        key = (value, only, info.shape, dims)
        try:
            kept = self._kept.get(key)
        except TypeError:  # a user's own spec may be mutable
            return self._bind(value, info.shape, dims, only)
        if kept is None:
            kept = self._kept[key] = self._bind(value, info.shape, dims, only)
        return kept

    def _bind(
        self, value: Any, shape: tuple[int, ...], dims: tuple[str, ...] | None, only: tuple[str, int] | None
    ) -> Bound:
        spec: Any = value
        try:
            spec = as_spec(value)
            if not isinstance(spec, Spec):
                return Bound(spec, bind(spec, shape, self._plan.axes.mesh, dims))
            spec = spec.only(*only) if only is not None else spec
            spec = positional(spec, shape, dims)
            return Bound(spec, bind(self._plan.axes.spelled(spec), shape, self._plan.axes.mesh, dims))
        except (LayoutError, SpecError) as error:
            return Bound(spec, None, error)

    def finding(self, bound: Bound, info: TensorInfo, line: Line) -> Finding:
        """The error of a layout that was not bound, told in the words of the plan."""
        assert bound.error is not None
        return misfit(bound.error, bound.spec, info, self.dims(info), line, self._plan)

    def meanings(self, lines: list[Line], info: TensorInfo) -> Mapping[int, object]:
        """What each line says of a tensor, equal where they agree, by the line's id."""
        found: dict[int, object] = {}
        for line in lines:
            bound = self.bound(line.value, info)
            found[id(line)] = line.value if bound is None else bound.spec if bound.layout is None else bound.layout
        return found
