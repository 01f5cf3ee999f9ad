"""Match a plan to a model: a layout for every tensor, the flows of modules, and all errors. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.line import Hook, Line, name_place, segment_place
from shardtensor.plan.match.layout_errors import Binder, shape_text
from shardtensor.plan.match.name_tree import Disputes, Matches, NameTree, match_lines
from shardtensor.plan.match.patterns import pattern
from shardtensor.plan.match.stores import read_ties, untied, with_stores, with_tied_names
from shardtensor.plan.match.unused import unplaced, unused
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import ModuleFlows, Placed, Resolved
from shardtensor.spec.diagnostics import nearest
from shardtensor.spec.nodes import Spec


def resolve(plan: Plan, model: Model) -> Resolved:
    """Return the layout of every tensor of `model` under `plan`, the flows of its modules, and the findings.

    `check_plan` checks flows and the balance of ranks afterwards. Takes as long for 16,384 ranks as for 4.
    Errors of a plan or a model are not raised: they are in `findings`.

    Args:
        plan: with every number known.
        model: names, global shapes and, where known, modules.

    Returns:
        the tensors that could be placed, in the order of the model, and after them the names that ties add.

    Example:
        >>> from shardtensor.mesh import Mesh
        >>> from shardtensor.plan.axes import Axes
        >>> plan = Plan(Axes(Mesh((("tp", 4),))), (Line("fc.weight", value=Spec("tp", None)),))
        >>> resolved = resolve(plan, Model((TensorInfo("fc.weight", (8, 6)),)))
        >>> str(resolved.tensors["fc.weight"].layout.boxes(1)[0]), resolved.errors
        ('[2:4, 0:6]', ())
    """
    model = with_tied_names(plan, model)
    tree = NameTree(model.by_name, model.paths)
    binder = Binder(plan, model, tree)
    ties, tie_findings = read_ties(plan, model, tree)
    matches = match_lines(plan.lines, tree)
    disputes = Disputes()

    placing = _Placing(plan, model, binder, ties, matches, disputes)
    tensors = placing.tensors()
    tensors, store_findings = with_stores(plan, model, tree, tensors)
    modules, module_findings = passings(model, matches, disputes, binder)
    nothing, unused_findings, styled = unused(plan, tree, matches)
    missing, reported = unplaced(plan, [name for name in placing.unmatched if name not in styled], nothing)
    findings = [
        *plan.findings,
        *tie_findings,
        *placing.findings,
        *missing,
        *(each.finding for each in nothing if not any(each is other for other in reported)),
        *unused_findings,
        *store_findings,
        *module_findings,
        *disputes.findings,
        *untied(plan, model, tensors),
    ]
    return Resolved(plan, model, tensors, modules, tuple(findings))


class _Placing:
    """Chooses the line of every tensor and binds its layout."""

    def __init__(
        self, plan: Plan, model: Model, binder: Binder, ties: Mapping[str, str], matches: Matches, disputes: Disputes
    ) -> None:
        self.findings: list[Finding] = []
        self.unmatched: list[str] = []
        self._plan, self._model, self._binder = plan, model, binder
        self._ties, self._matches, self._disputes = ties, matches, disputes
        self._assigned: dict[int, dict[str, tuple[str, int]]] = {}
        for line in plan.lines:
            if line.kind == "tensor":
                assigned, fault = _assign(line, matches.names[id(line)], plan)
                self._assigned[id(line)] = dict(assigned)
                self.findings += [] if fault is None else [fault]

    def tensors(self) -> dict[str, Placed]:
        """Return all tensors that could be placed."""
        placed: dict[str, Placed] = {}
        for info in self._model.tensors:
            if info.name not in self._ties:
                each = self._placed(info)
                placed |= {} if each is None else {info.name: each}
        found = {}
        for info in self._model.tensors:
            to = self._ties.get(info.name)
            source = placed.get(to or info.name)
            if source is not None:
                found[info.name] = source if to is None else attrs.evolve(source, tensor=info, tied_to=to)
        return found

    def _placed(self, info: TensorInfo) -> Placed | None:
        lines = self._matches.by_tensor.get(info.name)
        if not lines:
            return self._fallen(info)
        line: Line | None = lines[0]
        if len(lines) > 1:
            meanings = self._binder.meanings(list(lines), info)
            places = {key: (meaning, self._assigned[key].get(info.name)) for key, meaning in meanings.items()}
            line = self._disputes.winner(info.name, lines, places)
        if line is None:
            return None
        bound = self._binder.bound(line.value, info, self._assigned[id(line)].get(info.name))
        if bound is None:
            return None  # an object from Python that shards modules itself
        if isinstance(bound.spec, Spec) and bound.spec.partial_parts:
            self.findings.append(_partial(info, bound.spec, line))
        elif bound.layout is None:
            self.findings.append(self._binder.finding(bound, info, line))
        else:
            return Placed(info, bound.spec, bound.layout, line=line)
        return None

    def _fallen(self, info: TensorInfo) -> Placed | None:
        """Return a tensor that no line matches, with the layout of `unmatched`."""
        default = self._plan.unmatched
        if default is None:
            self.unmatched += [] if self._plan.is_part else [info.name]
            return None
        bound = self._binder.bound(default.spec, info)
        assert bound is not None, "unmatched has a spec"
        if bound.layout is None:
            line = Line("**", value=default.spec, origin=default.origin)
            self.findings.append(self._binder.finding(bound, info, line))
            return None
        self.findings.append(Finding(
            "N003", f"no rule matches it, so it falls to `unmatched: {default.spec}`", default.origin,
            f"{info.name} is {shape_text(info.shape, info.dims)}", "", (), info.name,
        ))  # fmt: skip
        return Placed(info, bound.spec, bound.layout)


def _partial(info: TensorInfo, spec: Spec, line: Line) -> Finding:
    return Finding(
        "E404", "a parameter is never `partial`", line.origin,
        f"{info.name} is `{spec}`: each rank would hold a partial sum of it, and no rank its value",
        "drop `partial`; it is for values, in `in` and `out`", (), info.name,
    )  # fmt: skip


def _assign(line: Line, names: tuple[str, ...], plan: Plan) -> tuple[Mapping[str, tuple[str, int]], Finding | None]:
    """Return the axis and the coordinate of each name of a line whose pattern has ``<axis>``; else nothing.

    Numbers are distributed among names that differ in nothing else: each layer distributes its own experts.
    """
    if "<" not in line.pattern:
        return {}, None
    read = pattern(line.pattern)
    at = [i for i, part in enumerate(read.wildcards) if part.kind == "number"]
    if not at:
        return {}, None
    axis, axes = read.wildcards[at[0]].text[1:-1], plan.axes
    place = segment_place(line, f"<{axis}>")
    if len(at) > 1:
        return {}, Finding(
            "E204", f"`{line.pattern}` deals numbers over two axes", place,
            "a tensor lives at one coordinate of one axis", "keep one `<axis>` and write `*` for the other",
        )  # fmt: skip
    if axis not in axes.mesh.names:
        why = (
            f"{axis} is made of {', '.join(axes.made_of[axis])}" if axis in axes.made_of else f"the mesh is {axes.mesh}"
        )
        fix = nearest(axis, axes.mesh.names) or f"write one of {', '.join(axes.mesh.names)} between `<` and `>`"
        fault = f"no mesh axis that is not made of others is called `{axis}`"
        return {}, Finding("E201", fault, place, why, fix)
    groups: dict[tuple[str, ...], dict[int, list[str]]] = {}
    for name in names:
        values = read.captures(name, is_below=True)
        if values is not None:
            rest = values[: at[0]] + values[at[0] + 1 :]
            groups.setdefault(rest, {}).setdefault(int(values[at[0]]), []).append(name)
    size = axes.size(axis)
    assigned: dict[str, tuple[str, int]] = {}
    for numbers in groups.values():
        if len(numbers) % size:
            first = numbers[min(numbers)][0]
            fits = ", ".join(str(n) for n in range(1, len(numbers) + 1) if len(numbers) % n == 0)
            return {}, Finding(
                "E205", f"{len(numbers)} numbered modules cannot be dealt evenly over {axis}={size}", place,
                f"`<{axis}>` stands for {min(numbers)} to {max(numbers)}, first in {first}; "
                f"{len(numbers)} % {size} = {len(numbers) % size}",
                f"choose {axis} from {fits}",
            )  # fmt: skip
        per = len(numbers) // size
        for order, value in enumerate(sorted(numbers)):
            assigned |= dict.fromkeys(numbers[value], (axis, order // per))
    return assigned, None


def passings(
    model: Model, matches: Matches, disputes: Disputes, binder: Binder
) -> tuple[dict[str, ModuleFlows], list[Finding]]:
    """Return the flows, hooks and attributes of each module that a line matches; E303 for those that it lacks."""
    found: dict[str, ModuleFlows] = {}
    findings: list[Finding] = []
    alike: dict[tuple[int, ...], ModuleFlows] = {}  # of modules that the same lines match
    for path, lines in matches.by_module.items():
        info = model.modules.get(path)
        key = tuple(map(id, lines))
        if key in alike and info is None:
            found[path] = alike[key]
            continue
        ins: dict[str, tuple[Flow, Line]] = {}
        outs: dict[str, tuple[Flow, Line]] = {}
        locals_: dict[str, tuple[Any, Line]] = {}
        uses: list[tuple[Hook, Line]] = []
        by_what = _by_what(lines)
        for what, group in by_what.items():
            meanings = {id(line): _meaning(line.value) for line in group}
            line = group[0] if len(group) == 1 else disputes.winner(path, group, meanings, what)
            if line is None:
                continue
            fault = _missing(line, path, info)
            if fault is None and line.kind == "local" and info is not None:
                fault = _uneven(line, path, info.counts[line.name], binder)
            if fault is not None:
                findings += [] if line.is_optional else [fault]
            elif line.kind == "in":
                ins[line.name] = line.value, line
            elif line.kind == "out":
                outs[line.name] = line.value, line
            elif line.kind == "local":
                locals_[line.name] = line.value, line
            else:
                uses.append((line.value, line))
        found[path] = ModuleFlows(ins, outs, tuple(uses), locals_)
        if len(by_what) == len(lines):
            alike[key] = found[path]
    return found, findings


def _by_what(lines: Any) -> Mapping[str, list[Line]]:
    """Return lines grouped by side or attribute: ``in mask``, ``local num_heads``."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        name = line.value.name if line.kind == "use" else line.name
        found.setdefault(f"{line.kind} {name}".strip(), []).append(line)
    return found


def _meaning(value: Any) -> object:
    return (value.name, value.args, dict(value.kwargs)) if isinstance(value, Hook) else value


def _missing(line: Line, path: str, info: ModuleInfo | None) -> Finding | None:
    """Return a finding if a module lacks the argument or attribute of a line; None if it has it, or if unknown."""
    if info is None or not line.name or line.kind not in ("in", "local"):
        return None
    if line.kind == "in":
        if not info.arguments or line.name in info.arguments or any(name.startswith("*") for name in info.arguments):
            return None
        fault = f"`forward` of {info.class_name} has no argument `{line.name}`"
        names, has, what = list(info.arguments), "takes", "one of them, or write `in` alone"
    else:
        if line.name in info.counts:
            return None
        fault = f"{info.class_name} has no attribute `{line.name}` that counts something"
        names, has, what = sorted(info.counts), "has", "a whole number that forward reads from self"
    why = f"{path or 'the module'} is a {info.class_name}, and {has} {', '.join(names) or 'none'}"
    fix = nearest(line.name, names) or f"name {what}"
    return Finding("E303", fault, name_place(line), why, fix, (), path)


def _uneven(line: Line, path: str, count: int, binder: Binder) -> Finding | None:
    info = TensorInfo(f"{path}.{line.name}" if path else line.name, (count,))
    bound = binder.bound(line.value, info)
    if bound is None or bound.error is None:
        return None
    found = binder.finding(bound, info, line)
    return attrs.evolve(found, fault=f"`local {line.name}`: {found.fault}")
