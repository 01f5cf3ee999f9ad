"""Bind the layouts of lines to tensors and the mesh; misfits become findings: E201 to E209, E404, E501."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
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
from shardtensor.spec.diagnostics import listed, nearest
from shardtensor.spec.nodes import Cut, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec

Message = tuple[str, str, str] | tuple[str, str, str, str]
"""The fault, the reason and the fix of a finding, and perhaps a note."""


@attrs.frozen(eq=False)
class Misfit:
    """A spec that does not fit, the tensor, and the numbers and the text of the error."""

    spec: ShardingSpec
    info: TensorInfo
    dims: tuple[str, ...] | None
    line: Line
    plan: Plan
    about: Mapping[str, Any]
    fault: str

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
    def axes(self) -> str:
        """``tp=16``."""
        return f"{'*'.join(self.cut.axes)}={self.about['count']}"

    @property
    def dim(self) -> str:
        """The dim that does not fit, by its name if it has one."""
        number = self.about["dim"]
        return f"`{self.dims[number]}`" if self.dims is not None else str(number)

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


def axes_text(plan: Plan) -> str:
    """Return a sentence with the axes of a plan's mesh."""
    axes = plan.axes
    factors = {leaf for leaves in axes.made_of.values() for leaf in leaves}
    names = [*(name for name in axes.mesh.names if name not in factors), *axes.made_of]
    made = [f"{name} is made of {', '.join(leaves)}" for name, leaves in axes.made_of.items()]
    return ", and ".join([f"the mesh of this plan has the axes {', '.join(names)}", *made])


def _unknown_axis(case: Misfit) -> Message:
    names = case.plan.axes.names
    return case.fault, axes_text(case.plan), nearest(case.about["name"], names) or f"use one of {', '.join(names)}"


def _dim_count(case: Misfit) -> Message | None:
    given = case.about.get("given", case.about.get("least"))
    ndim = len(case.info.shape)
    if given is None or not isinstance(case.spec, Spec):
        return None
    least = "at least " * ("least" in case.about)
    entries = [dim for dim in case.spec.dims if dim is not ...]
    kept = [*entries[:ndim], *[None] * (ndim - len(entries))]
    cut = next((i for i, dim in enumerate(kept) if dim is not None), None)
    fix = "write `replicate`"
    if cut is not None:
        is_last = 0 < cut == given - 1 == ndim - 1
        some = (..., kept[cut]) if is_last else (*kept[: cut + 1], ...)
        fix = f"write `{Spec.of(tuple(kept))}` or `replicate`; `{Spec.of(some)}` fits any number of dims"
    return f"the layout has {least}{_many(given, 'dim')}, the tensor has {ndim}", case.shape, fix


def _dim_name(case: Misfit) -> Message:
    if case.dims is None:
        named = ", ".join(name for name, _ in case.spec.named) if isinstance(case.spec, Spec) else ""
        return (
            f"the layout names the dim `{named}`, and the dims of this tensor have no known names",
            f"{case.shape}; names come from the type of its layer, or from `dims` lines",
            "write the cut by position, such as `[tp, -]`; or add a line `dims PATTERN (out = ..., in = ...)`",
        )
    name = case.about["name"]
    near = nearest(name, case.dims) or f"its dims are {listed([f'`{dim}`' for dim in case.dims])}"
    return f"this tensor has no dim called `{name}`", case.shape, near


def _uneven(case: Misfit) -> Message:
    length, count, unit = case.about["length"], case.about["count"], case.cut.unit
    units = length // unit
    heads = any(units == value for key, value in case.plan.config.items() if "head" in key)
    what = f"{units} {'heads' if heads else 'units'} of {unit}" if unit > 1 else f"{length} elements of dim {case.dim}"
    whole = case.info.shape[case.about["dim"]]
    facts = [case.shape]
    if whole != length:
        blocks = "blocks of {} and others" if whole % length else f"{whole // length} blocks of {{}}"
        facts.append(f"{whole} = {blocks.format(length)}")
    rest = f"{units} % {count} = {units % count}"
    facts.append(f"{length} = {units} units of {unit} and {rest}" if unit > 1 else rest)
    message = f"{what} cannot be split evenly over {case.axes}", "; ".join(facts), _even_fix(case, units)
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


def _blocks(case: Misfit) -> Message:
    shares, length = case.about["shares"], case.about["length"]
    total = sum(shares)
    fault, why = f"dim {case.dim} of {length} elements is not ", f"{case.shape}; {length} % {total} = {length % total}"
    if len(set(shares)) == 1:
        return f"{fault}{len(shares)} equal blocks", why, f"the number of blocks has to divide {length}"
    fault += f"blocks in the proportion {' : '.join(map(str, shares))}"
    fix = f"give shares that add up to a divisor of {length}"
    return fault, f"{why}, and {total} is what the shares add up to", fix


def _unit(case: Misfit) -> Message:
    length, unit = case.about["length"], case.cut.unit
    why = f"{case.shape}; {length} = {length // unit} units of {unit} and {length % unit} more"
    common = math.gcd(length, unit)
    fix = f"choose a unit that divides {length}{f', such as {common}' * (common > 1)}; or write `pad({unit})`"
    return f"dim {case.dim} of {length} elements is not whole units of {unit}", why, fix


def _sizes(case: Misfit) -> Message | None:
    if "clash" in case.about:
        return None
    cut, count = case.cut, case.about["count"]
    length = case.info.shape[case.about["dim"]]
    assert cut.sizes is not None
    bad = next((size for size in cut.sizes if size % cut.unit), None)
    if len(cut.sizes) != count:
        fault = f"{_many(len(cut.sizes), 'size')} for the {count} pieces of {case.axes}"
    elif bad is not None:
        fault = f"the size {bad} is not a multiple of the unit {cut.unit}"
    else:
        fault = f"the sizes add up to {sum(cut.sizes)}, dim {case.dim} has {length} elements"
    why = case.shape + f"; {' + '.join(map(str, cut.sizes))} = {sum(cut.sizes)}" * (len(cut.sizes) > 1)
    unit = f", multiples of {cut.unit}," * (cut.unit > 1)
    return fault, why, f"give {_many(count, 'size')}{unit} that add up to {length}"


def _rank(case: Misfit) -> Message:
    rank, world = case.about["rank"], case.plan.axes.mesh.size
    fix = f"name ranks 0 to {world - 1}, or run with --world {rank + 1}"
    return f"rank {rank} is outside the world of {_many(world, 'rank')}", f"ranks count from 0; {case.shape}", fix


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


_MESSAGES: dict[str, tuple[str, Callable[[Misfit], Message | None]]] = {
    "E201": ("name", _unknown_axis),
    "E202": ("", _dim_count),
    "E203": ("", _dim_name),
    "E205": ("cut", _uneven),
    "E206": ("", _blocks),
    "E207": ("", _unit),
    "E208": ("cut", _sizes),
    "E501": ("rank", _rank),
}
"""By the code: the number that the error must have, and a function that writes the finding in the plan's words."""


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
        case = Misfit(bound.spec, info, self.dims(info), line, self._plan, about, error.fault)
        code, facts = error.code or "E202", dict(error.rows)
        needed, write = _MESSAGES.get(code, ("", None))
        message = write(case) if write is not None and (not needed or about.get(needed) is not None) else None
        if message is None:
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
