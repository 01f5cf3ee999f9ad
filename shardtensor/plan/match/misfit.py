"""Binds the layout of a line to a tensor and the mesh; one that does not fit is a finding: E201 to E209, E404, E501."""

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
from shardtensor.plan.findings.places import mesh_place, style_note
from shardtensor.plan.line import Line
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.models.model import Model, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.spec.diagnostics import listed, nearest
from shardtensor.spec.nodes import Cut, ShardingSpec, Spec
from shardtensor.spec.parse import as_spec


@attrs.frozen(eq=False)
class Case:
    """One misfit: the spec as far as it was read, the tensor, and the numbers that its error carries."""

    code: str
    spec: ShardingSpec
    info: TensorInfo
    dims: tuple[str, ...] | None
    line: Line
    plan: Plan
    about: Mapping[str, Any]
    message: str
    facts: Mapping[str, str]

    def refused(self, fault: str, why: str, fix: str, *notes: str) -> Finding:
        """The finding."""
        line = self.line
        rule = (f"the rule is `{line.pattern}: {line.value}`",) if line.origin is None else ()
        said = (*style_note(line.origin, "layout"), *rule, *notes)
        return Finding(self.code, fault, line.origin, why, fix, said, self.info.name)

    @property
    def shape(self) -> str:
        """``model.norm.weight is (embed=4096)``."""
        return f"{self.info.name} is {shape_text(self.info.shape, self.dims)}"

    @property
    def cut(self) -> Cut:
        """The cut that does not fit, in the axes that the plan wrote."""
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
        """The dim that does not fit, by its name where it has one."""
        number = self.about["dim"]
        return f"`{self.dims[number]}`" if self.dims is not None else str(number)


def misfit(
    error: LayoutError | SpecError,
    spec: ShardingSpec,
    info: TensorInfo,
    dims: tuple[str, ...] | None,
    line: Line,
    plan: Plan,
) -> Finding:
    """The finding of an error that binding `spec` to a tensor gave."""
    about = error.about if isinstance(error, LayoutError) else {}
    code = error.code or "E202"
    return _TELL.get(code, _plainly)(Case(code, spec, info, dims, line, plan, about, error.fault, dict(error.rows)))


def shape_text(shape: tuple[int, ...], dims: tuple[str, ...] | None = None) -> str:
    """A shape, with the names of its dims.

    Example:
        >>> shape_text((1024, 4096), ("out", "in")), shape_text((7,))
        ('(out=1024, in=4096)', '(7)')
    """
    names = [f"{name}=" for name in dims] if dims is not None and len(dims) == len(shape) else [""] * len(shape)
    return f"({', '.join(f'{name}{size}' for name, size in zip(names, shape, strict=True))})"


def axes_text(plan: Plan) -> str:
    """The axes of a plan's mesh, as a sentence lists them."""
    axes = plan.axes
    factors = {leaf for leaves in axes.made_of.values() for leaf in leaves}
    names = [*(name for name in axes.mesh.names if name not in factors), *axes.made_of]
    made = [f"{name} is made of {', '.join(leaves)}" for name, leaves in axes.made_of.items()]
    return ", and ".join([f"the mesh of this plan has the axes {', '.join(names)}", *made])


def _plainly(case: Case) -> Finding:
    why = "; ".join([case.shape, *(f"{key} {value}" for key, value in case.facts.items() if key in ("both", "volume"))])
    return case.refused(
        case.message, why, next((case.facts[key] for key in ("fix", "either") if key in case.facts), "")
    )


def _unknown_axis(case: Case) -> Finding:
    name = case.about.get("name")
    if name is None:
        return _plainly(case)
    near = nearest(name, case.plan.axes.names)
    return case.refused(case.message, axes_text(case.plan), near or f"use one of {', '.join(case.plan.axes.names)}")


def _dim_count(case: Case) -> Finding:
    given = case.about.get("given", case.about.get("least"))
    ndim = len(case.info.shape)
    if given is None or not isinstance(case.spec, Spec):
        return _plainly(case)
    least = "at least " * ("least" in case.about)
    fault = f"the layout has {least}{_many(given, 'dim')}, the tensor has {ndim}"
    entries = [dim for dim in case.spec.dims if dim is not ...]
    kept = [*entries[:ndim], *[None] * (ndim - len(entries))]
    cut = next((i for i, dim in enumerate(kept) if dim is not None), None)
    ways = [f"`{Spec.of(tuple(kept))}`"] * (cut is not None) + ["`replicate`"]
    fix = f"write {' or '.join(ways)}"
    if cut is not None:
        is_last = 0 < cut == given - 1 == ndim - 1
        some = (..., kept[cut]) if is_last else (*kept[: cut + 1], ...)
        fix += f"; `{Spec.of(some)}` fits any number of dims"
    return case.refused(fault, case.shape, fix)


def _dim_name(case: Case) -> Finding:
    if case.dims is None:
        named = ", ".join(name for name, _ in case.spec.named) if isinstance(case.spec, Spec) else ""
        why = f"{case.shape}; names come from the type of its layer, or from `dims` lines"
        fix = "write the cut by position, such as `[tp, -]`; or add a line `dims PATTERN (out = ..., in = ...)`"
        fault = f"the layout names the dim `{named}`, and the dims of this tensor have no known names"
        return case.refused(fault, why, fix)
    name = case.about["name"]
    near = nearest(name, case.dims) or f"its dims are {listed([f'`{dim}`' for dim in case.dims])}"
    return case.refused(f"this tensor has no dim called `{name}`", case.shape, near)


def _twice(case: Case) -> Finding:
    return case.refused(case.message, case.facts.get("why", ""), case.facts.get("fix", ""))


def _uneven(case: Case) -> Finding:
    if "cut" not in case.about:
        return _plainly(case)
    length, count, unit = case.about["length"], case.about["count"], case.cut.unit
    units = length // unit
    what = f"{units} {_unit_word(case, units)} of {unit}" if unit > 1 else f"{length} elements of dim {case.dim}"
    whole = case.info.shape[case.about["dim"]]
    facts = [f"{whole} = blocks of {length} and others"] if whole != length else []
    if whole != length and whole % length == 0:
        facts = [f"{whole} = {whole // length} blocks of {length}"]
    rest = f"{units} % {count} = {units % count}"
    facts += [f"{length} = {units} units of {unit} and {rest}" if unit > 1 else rest]
    notes: tuple[str, ...] = ()
    call = case.line.origin.text if case.line.origin is not None else ""
    written = re.search(r"\bunit\s*=\s*[\w.]+", call) or re.search(r"\bunit\([^()]*\)", call)
    if unit > 1 and length % count == 0 and written is not None:
        single = {"heads": "head"}.get(_unit_word(case, units), "unit")
        notes = (f"to cut inside a {single} on purpose, drop `{re.sub(r'=', ' = ', re.sub(r' ', '', written[0]))}`",)
    fault = f"{what} cannot be split evenly over {case.axes}"
    return case.refused(fault, "; ".join([case.shape, *facts]), _even_fix(case, units), *notes)


def _even_fix(case: Case, units: int) -> str:
    axes = case.plan.axes
    (axis, *others) = case.cut.axes
    leaves = axes.made_of.get(axis, ())
    if not others and len(leaves) > 1:
        size = axes.size(leaves[0])
        if size > 1 and units % size == 0:
            copies = "*".join(leaves[1:])
            made = listed([f"{leaf}={axes.size(leaf)}" for leaf in leaves]).replace(" or ", " and ")
            mesh = mesh_place(case.plan)
            maker = f"line {mesh.line} makes" if mesh is not None else "the mesh makes"
            call = _shared(case, leaves)
            how = f": `{call}`" if call else f", with copies along {copies}"
            return f"use the factor `{leaves[0]}` ({size}){how}; {maker} {axis}={axes.size(axis)} of {made}"
    fits = [str(n) for n in range(1, min(units, 1024) + 1) if units % n == 0]
    shown = ", ".join(fits if len(fits) < 10 else [*fits[:8], "..."])
    differ = "by one unit" if case.cut.unit > 1 else "by one"
    axes_of = "*".join(case.cut.axes)
    return f"{axes_of} has to divide {units} ({shown}); or write `balanced` after it for pieces that differ {differ}"


def _shared(case: Case, leaves: tuple[str, ...]) -> str:
    """The call of a style that copies over the other factors, where the plan calls ``colwise`` and has that style."""
    call = case.line.origin.text if case.line.origin is not None else ""
    if not any(re.search(r"^style colwise_shared\(", source.text, re.MULTILINE) for source in case.plan.sources):
        return ""
    found = re.fullmatch(r"colwise\(\s*\w+\s*(.*)\)", call)
    if found is None or "blocks" in call:
        return ""
    return f"colwise_shared({leaves[0]}, copies={'*'.join(leaves[1:])}{found[1]})"


def _unit_word(case: Case, units: int) -> str:
    """``heads``, where the model's config counts so many heads."""
    heads = (value for key, value in case.plan.config.items() if "head" in key)
    return "heads" if units in heads else "units"


def _blocks(case: Case) -> Finding:
    shares, length = case.about["shares"], case.about["length"]
    equal = len(set(shares)) == 1
    blocks = f"{len(shares)} equal blocks" if equal else f"blocks in the proportion {' : '.join(map(str, shares))}"
    total = sum(shares)
    why = f"{case.shape}; {length} % {total} = {length % total}" + (
        "" if equal else f", and {total} is what the shares add up to"
    )
    return case.refused(
        f"dim {case.dim} of {length} elements is not {blocks}",
        why,
        f"the number of blocks has to divide {length}"
        if equal
        else f"give shares that add up to a divisor of {length}",
    )


def _unit(case: Case) -> Finding:
    length, unit = case.about["length"], case.cut.unit
    why = f"{case.shape}; {length} = {length // unit} units of {unit} and {length % unit} more"
    common = math.gcd(length, unit)
    fix = f"choose a unit that divides {length}{f', such as {common}' * (common > 1)}; or write `pad({unit})`"
    return case.refused(f"dim {case.dim} of {length} elements is not whole units of {unit}", why, fix)


def _sizes(case: Case) -> Finding:
    if "cut" not in case.about or "clash" in case.about:
        return _plainly(case)
    cut, count = case.cut, case.about["count"]
    length = case.info.shape[case.about["dim"]]
    assert cut.sizes is not None
    if len(cut.sizes) != count:
        fault = f"{_many(len(cut.sizes), 'size')} for the {count} pieces of {case.axes}"
    elif any(size % cut.unit for size in cut.sizes):
        bad = next(size for size in cut.sizes if size % cut.unit)
        fault = f"the size {bad} is not a multiple of the unit {cut.unit}"
    else:
        fault = f"the sizes add up to {sum(cut.sizes)}, dim {case.dim} has {length} elements"
    why = case.shape + f"; {' + '.join(map(str, cut.sizes))} = {sum(cut.sizes)}" * (len(cut.sizes) > 1)
    unit = f", multiples of {cut.unit}," * (cut.unit > 1)
    return case.refused(fault, why, f"give {_many(count, 'size')}{unit} that add up to {length}")


def _rank(case: Case) -> Finding:
    rank, world = case.about.get("rank"), case.plan.axes.mesh.size
    if rank is None:
        return _plainly(case)
    fix = f"name ranks 0 to {world - 1}, or run with --world {rank + 1}"
    fault = f"rank {rank} is outside the world of {_many(world, 'rank')}"
    return case.refused(fault, f"ranks count from 0; {case.shape}", fix)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


_TELL: dict[str, Callable[[Case], Finding]] = {
    "E201": _unknown_axis,
    "E202": _dim_count,
    "E203": _dim_name,
    "E204": _twice,
    "E205": _uneven,
    "E206": _blocks,
    "E207": _unit,
    "E208": _sizes,
    "E209": _plainly,
    "E501": _rank,
}


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
