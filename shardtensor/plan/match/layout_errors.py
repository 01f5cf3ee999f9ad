"""Bind the layouts of lines to tensors and the mesh; those that do not fit become findings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from shardtensor.errors import LayoutError, SpecError
from shardtensor.layout.bind import bind
from shardtensor.layout.cutting import positional
from shardtensor.layout.layout import Layout
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.line import Line, mesh_place, style_note
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.spec.diagnostics import listed
from shardtensor.spec.nodes import Cut, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec

Message = tuple[str, str, str] | tuple[str, str, str, str]
"""The fault, the reason and the fix of a finding, and perhaps a note."""


@attrs.frozen(eq=False)
class Misfit:
    """A cut that is not even: its spec, the tensor, and the numbers of the error."""

    spec: ShardingSpec
    info: TensorInfo
    dims: tuple[str, ...] | None
    line: Line
    plan: Plan
    about: Mapping[str, Any]

    @property
    def shape(self) -> str:
        """``model.norm.weight is (embed=4096)``."""
        return f"{self.info.name} is {shape_text(self.info.shape, self.dims)}"

    @property
    def cut(self) -> Cut:
        """The cut that does not fit, in the axes that are written in the plan."""
        dim = self.about["dim"]
        if isinstance(self.spec, Spec) and dim < len(self.spec.dims) and isinstance(self.spec.dims[dim], Cut):
            return self.spec.dims[dim]
        return self.about["cut"]

    @property
    def call(self) -> str:
        """The text of the plan there; empty for rules made in Python."""
        return self.line.origin.text if self.line.origin is not None else ""


def shape_text(shape: tuple[int, ...], dims: tuple[str, ...] | None = None) -> str:
    """Return a shape as text, with the names of its dims.

    Example:
        >>> shape_text((1024, 4096), ("out", "in")), shape_text((7,))
        ('(out=1024, in=4096)', '(7)')
    """
    names = [f"{name}=" for name in dims] if dims is not None and len(dims) == len(shape) else [""] * len(shape)
    return f"({', '.join(f'{name}{size}' for name, size in zip(names, shape, strict=True))})"


def _uneven(case: Misfit) -> Message:
    length, count, unit = case.about["length"], case.about["count"], case.cut.unit
    units = length // unit
    heads = any(units == value for key, value in case.plan.config.items() if "head" in key)
    number = case.about["dim"]
    dim = f"`{case.dims[number]}`" if case.dims is not None else number
    what = f"{units} {'heads' if heads else 'units'} of {unit}" if unit > 1 else f"{length} elements of dim {dim}"
    whole = case.info.shape[number]
    facts = [case.shape]
    if whole != length:
        blocks = "blocks of {} and others" if whole % length else f"{whole // length} blocks of {{}}"
        facts.append(f"{whole} = {blocks.format(length)}")
    rest = f"{units} % {count} = {units % count}"
    facts.append(f"{length} = {units} units of {unit} and {rest}" if unit > 1 else rest)
    fault = f"{what} cannot be split evenly over {'*'.join(case.cut.axes)}={count}"
    message = fault, "; ".join(facts), _even_fix(case, units)
    written = re.search(r"\bunit\s*=\s*[\w.]+", case.call) or re.search(r"\bunit\([^()]*\)", case.call)
    if unit > 1 and length % count == 0 and written is not None:
        argument = re.sub(r"=", " = ", re.sub(r" ", "", written[0]))
        return *message, f"to cut inside a {'head' if heads else 'unit'} on purpose, drop `{argument}`"
    return message


def _even_fix(case: Misfit, units: int) -> str:
    axes, (axis, *others) = case.plan.axes, case.cut.axes
    leaves = axes.made_of.get(axis, ())
    size = axes.size(leaves[0]) if leaves else 1
    if not others and len(leaves) > 1 and size > 1 and units % size == 0:
        copies = "*".join(leaves[1:])
        made = listed([f"{leaf}={axes.size(leaf)}" for leaf in leaves]).replace(" or ", " and ")
        mesh = mesh_place(case.plan)
        maker = f"line {mesh.line} makes" if mesh is not None else "the mesh makes"
        call = re.fullmatch(r"colwise\(\s*\w+\s*(.*)\)", case.call)
        has_style = any(re.search(r"^style colwise_shared\(", each.text, re.MULTILINE) for each in case.plan.sources)
        how = f", with copies along {copies}"
        if call is not None and has_style and "blocks" not in case.call:
            how = f": `colwise_shared({leaves[0]}, copies={copies}{call[1]})`"
        return f"use the factor `{leaves[0]}` ({size}){how}; {maker} {axis}={axes.size(axis)} of {made}"
    fits = [str(n) for n in range(1, min(units, 1024) + 1) if units % n == 0]
    shown = ", ".join(fits if len(fits) < 10 else [*fits[:8], "..."])
    differ = "by one unit" if case.cut.unit > 1 else "by one"
    axes_of = "*".join(case.cut.axes)
    return f"{axes_of} has to divide {units} ({shown}); or write `balanced` after it for pieces that differ {differ}"


@attrs.frozen(eq=False)
class Bound:
    """A spec by position, and its layout, or an error instead of the layout."""

    spec: ShardingSpec
    layout: Layout | None = None
    error: LayoutError | SpecError | None = None


class Binder:
    """Binds the layouts of a plan to the tensors of a model; equal ones are bound once."""

    def __init__(self, plan: Plan, model: Model, tree: NameTree) -> None:
        self._plan = plan
        self._model = model
        self._declared = {name: line.names for line in plan.dims for name in tree.tensors(line.pattern)}
        self._kept: dict[object, Bound] = {}
        self._dims: dict[str, tuple[str, ...] | None] = {}

    def dims(self, info: TensorInfo) -> tuple[str, ...] | None:
        """Return the names of a tensor's dims: its own, those of a ``dims`` line, or those of its type of layer."""
        if info.dims is not None:
            return info.dims
        if info.name not in self._dims:
            path, _, leaf = info.name.rpartition(".")
            kind = self._model.kind(path)
            found = self._declared.get(info.name) or (kind.dims.get(leaf) if kind is not None else None)
            fits = found is not None and len(found) == len(info.shape)
            self._dims[info.name] = found if fits else None
        return self._dims[info.name]

    def bound(self, value: Any, info: TensorInfo, only: tuple[str, int] | None = None) -> Bound | None:
        """Return a line's value bound to a tensor; None if it is no spec (it shards modules itself)."""
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
        """Return the finding for a layout that was not bound, in the words of the plan."""
        error = bound.error
        assert error is not None
        about = error.about if isinstance(error, LayoutError) else {}
        case = Misfit(bound.spec, info, self.dims(info), line, self._plan, about)
        code, facts = error.code or "E202", dict(error.rows)
        if code == "E205" and "cut" in about:  # a plan knows more than one tensor: factors of axes, heads
            message = _uneven(case)
        else:
            ways = [facts[key] for key in ("fix", "either") if key in facts]
            texts = [f"{key} {facts[key]}" for key in ("both", "volume") if key in facts]
            why = facts.get("why", "") if code == "E204" else "; ".join([case.shape, *texts])
            message = error.fault, why, ways[0] if ways else ""
        fault, why, fix, *notes = message
        rule = (f"the rule is `{line.pattern}: {line.value}`",) if line.origin is None else ()
        notes = [*style_note(line.origin, "layout"), *rule, *notes]
        return Finding(code, fault, line.origin, why, fix, tuple(notes), info.name)

    def meanings(self, lines: list[Line], info: TensorInfo) -> Mapping[int, object]:
        """Return by each line's id its layout of a tensor; the values are equal if lines agree."""
        found: dict[int, object] = {}
        for line in lines:
            bound = self.bound(line.value, info)
            found[id(line)] = line.value if bound is None else bound.spec if bound.layout is None else bound.layout
        return found
