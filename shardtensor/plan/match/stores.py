"""``store P: flat(dp) by U``: the range of each parameter that a rank stores; ``tie A = B``: names of one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.line import Line, Store, Tie
from shardtensor.plan.match.layout_errors import shape_text
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.match.patterns import expanded, pattern
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Placed
from shardtensor.spec.nodes import Spec


def with_stores(
    plan: Plan, model: Model, tree: NameTree, placed: Mapping[str, Placed]
) -> tuple[dict[str, Placed], list[Finding]]:
    """Return all tensors with the `store` of each parameter; buffers have none, tied names that of their tensor."""
    findings = [finding for store in plan.stores for finding in _unused(store, tree)]
    stores: dict[str, list[Store]] = {}
    for store in plan.stores:
        for name in tree.tensors(store.pattern):
            stores.setdefault(name, []).append(store)
    units = {id(store): frozenset(path for text in store.by for path in tree.modules(text)) for store in plan.stores}
    names_of = _all_names(model, placed)
    kept, winner_of = dict(placed), dict[str, Store]()
    for name, each in placed.items():
        if each.tensor.is_buffer or each.tied_to or name not in stores:
            continue
        store, *others = stores[name]
        if others:
            findings.append(_two(name, others[-1], store))
        if others or store.flat is None:
            continue
        fault = _clash(plan, store, each)
        if fault is not None:
            findings.append(fault)
            continue
        findings += _same_samples(plan, store, name)
        unit = _unit(names_of.get(name, (name,)), units[id(store)])
        kept[name], winner_of[name] = attrs.evolve(each, stored=store.flat, unit=unit), store
    findings += _unit_faults(model, kept, winner_of)
    for name, each in kept.items():
        if each.tied_to and each.tied_to in kept:
            source = kept[each.tied_to]
            kept[name] = attrs.evolve(each, stored=source.stored, unit=source.unit)
    return kept, findings


def _all_names(model: Model, placed: Mapping[str, Placed]) -> dict[str, tuple[str, ...]]:
    """Return for tensors with several names all of these, those of the model and those of ties."""
    found = {name: names for names in model.tied for name in names}
    for name, each in placed.items():
        if to := each.tied_to:
            found[to] = (*found.get(to, (to,)), *found.get(name, (name,)))
    return found


def _unit(names: Sequence[str], units: frozenset[str]) -> str:
    """Return the deepest module among `units` that contains all names; the root if there is none."""
    path, _, _ = names[0].rpartition(".")
    while path:
        if path in units and all(name.startswith(f"{path}.") for name in names):
            return path
        path, _, _ = path.rpartition(".")
    return ""


def _clash(plan: Plan, store: Store, placed: Placed) -> Finding | None:
    """Return a finding if a parameter cannot be flat over the axes of a store; None if it can."""
    assert store.flat is not None
    spec, name = placed.spec, placed.tensor.name
    if not isinstance(spec, Spec):
        return Finding(
            "E204", "a layout that names devices cannot be stored flat over mesh axes", store.origin,
            f"{name} is `{spec}`", "write the layout in axes, or `store` these tensors as `replicate`",
            (), name,
        )  # fmt: skip
    used = plan.axes.leaves(sorted(spec.axis_names))
    twice = next((axis for axis in store.flat.axes if set(plan.axes.leaves((axis,))) & set(used)), None)
    if twice is None and spec.flat_part is None:
        return None
    shape = shape_text(placed.tensor.shape, placed.tensor.dims)
    if twice is None:
        fault, why = "this tensor is flat by its layout already", f"{name} is {shape}, laid out `{spec}`"
        fix = "drop `flat` from the layout: `store` says how a parameter is kept"
    else:
        fault = f"axis `{twice}` cuts this tensor, and the store is flat over it"
        why = f"each rank has a single {twice} coordinate; {name} is {shape}, laid out `{spec}`"
        rest = [axis for axis in store.flat.axes if not set(plan.axes.leaves((axis,))) & set(used)]
        how = f"flat({'*'.join(rest)})" if rest else "replicate"
        fix = f"narrow the pattern, and give these tensors a line of their own: `store PATTERN: {how}`"
    return Finding("E204", fault, store.origin, why, fix, (), name)


def _unit_faults(model: Model, kept: Mapping[str, Placed], stores: Mapping[str, Store]) -> Iterator[Finding]:
    """Yield findings for gather units: parameters stored over different axes, and modules that are never called."""
    first: dict[str, str] = {}
    for name, store in stores.items():
        unit = kept[name].unit or ""
        if unit not in first:
            first[unit] = name
            module = model.modules.get(unit)
            if module is not None and module.class_name in ("ModuleList", "ModuleDict"):
                yield Finding(
                    "E303", f"the gather unit {unit} is a {module.class_name}, which is never called", store.origin,
                    "its parameters are gathered when its forward begins", f"write `by {unit}.*`", (), unit,
                )  # fmt: skip
        other = stores[first[unit]]
        assert store.flat is not None and other.flat is not None
        if store.flat.axes != other.flat.axes:
            place = other.origin if other.origin is not None else f"`store {other.pattern}`"
            yield Finding(
                "E302", f"parameters of {f'the gather unit {unit}' if unit else 'one gather unit'} are stored over "
                "different axes", store.origin,
                f"{name} over {'*'.join(store.flat.axes)}, {first[unit]} over {'*'.join(other.flat.axes)}: a unit is "
                "gathered in one message",
                "store them alike, or name other modules after `by`", (f"the other line is {place}",), name,
            )  # fmt: skip


def _same_samples(plan: Plan, store: Store, name: str) -> Iterator[Finding]:
    """Yield a finding for a store over ranks with the same samples: its gradients are not summed over them."""
    assert store.flat is not None
    data = plan.axes.leaves(plan.axes.data)
    other = [axis for axis in store.flat.axes if not set(plan.axes.leaves((axis,))) <= set(data)]
    if not other:
        return
    names = ", ".join(f"`{axis}`" for axis in other)
    yield Finding(
        "E204", f"parameters are stored over {names}, along which samples do not differ", store.origin,
        f"data is {'*'.join(plan.axes.data) or 'not said'}: gradients of ranges are summed over the axes of samples",
        f"write `data {'*'.join((*plan.axes.data, *other))}`, or store them over axes of `data`", (), name,
    )  # fmt: skip


def _two(name: str, store: Store, other: Store) -> Finding:
    place = other.pattern_origin if other.pattern_origin is not None else f"`store {other.pattern}`"
    return Finding(
        "E302", f"`{name}` is matched by two `store` lines", store.pattern_origin,
        "a parameter is stored in one way: order in the file never decides", "narrow one pattern",
        (f"the other line is {place}",), name,
    )  # fmt: skip


def _unused(store: Store, tree: NameTree) -> list[Finding]:
    found = []
    if not tree.tensors(store.pattern):
        fault = f"`store {store.pattern}` matches no tensor"
        found.append(
            Finding("W301", fault, store.pattern_origin, "it keeps nothing", "correct the pattern, or drop the line")
        )
    if store.by and not any(tree.modules(text) for text in store.by):  # one may be for other families
        fault = f"`by {', '.join(store.by)}` matches no module"
        why = "what no pattern after `by` holds is gathered all at once, with the root"
        found.append(Finding("W301", fault, store.origin, why, "correct the pattern, or drop it"))
    return found


def with_tied_names(plan: Plan, model: Model) -> Model:
    """Return `model` with the names that ties add to its tensors: files store a tied tensor under one name."""
    missing = {}
    for tie in plan.ties:
        for name, to in _pairs(tie) or ():
            if name not in model.by_name and to in model.by_name and name not in missing:
                missing[name] = attrs.evolve(model.by_name[to], name=name)
    return attrs.evolve(model, tensors=(*model.tensors, *missing.values())) if missing else model


def read_ties(plan: Plan, model: Model, tree: NameTree) -> tuple[dict[str, str], list[Finding]]:
    """Return for each tied name the name whose layout it takes, and findings; `model` is from `with_tied_names`."""
    found: dict[str, tuple[str, Tie]] = {}
    findings: list[Finding] = []
    group = {name: names for names in model.tied for name in names}
    for tie in plan.ties:
        pairs = _pairs(tie, tree)
        if pairs is None:
            findings.append(_unpaired(tie))
        for name, to in pairs or ():
            if name == to or name not in model.by_name or to not in model.by_name:
                continue
            if name in found and found[name][0] != to:
                findings.append(_two_partners(name, to, *found[name], tie))
            elif (fault := _differ(name, to, model, group)) is not None:
                findings.append(attrs.evolve(fault, origin=tie.origin))
            else:
                found[name] = to, tie
    for name, (to, tie) in found.items():
        if to in found:
            why = f"`{name}` = `{to}` = `{found[to][0]}`"
            fix = "tie all names to the one that has a rule"
            findings.append(Finding("E304", f"`{to}` is tied itself", tie.origin, why, fix, (), name))
    return {name: to for name, (to, _) in found.items() if to not in found}, findings


MOST_NAMES = 4096
"""The largest number of names on one side of a tie."""


def _pairs(tie: Tie, tree: NameTree | None = None) -> list[tuple[str, str]] | None:
    """Return the names that a tie makes one, in pairs; None if its sides do not pair. With ``*``, those in `tree`."""
    left, right = ([*islice(expanded(text), MOST_NAMES)] for text in (tie.pattern, tie.to))
    if len(right) not in (1, len(left)) or tie.to.count("*") > tie.pattern.count("*"):
        return None
    found = []
    for one, other in zip(left, right * (len(left) // len(right)), strict=True):
        if "*" not in one:
            found.append((one, other))
            continue
        for name in tree.tensors(one) if tree is not None else ():
            first, *rest = re.split(r"\*+", other)
            values = pattern(one).captures(name) or ()
            found.append((name, first + "".join(value + text for value, text in zip(values, rest, strict=False))))
    return found


def _unpaired(tie: Tie) -> Finding:
    return Finding(
        "E304", f"the alternatives of `{tie.pattern}` and `{tie.to}` do not pair", tie.origin,
        "`{a,b} = {c,d}` ties a to c and b to d; `*` stands for the same on both sides",
        "write as many alternatives on the right as on the left, or one name", (), tie.pattern,
    )  # fmt: skip


def _two_partners(name: str, to: str, other: str, first: Tie, tie: Tie) -> Finding:
    return Finding(
        "E304", f"`{name}` is tied to two tensors", tie.origin, f"to `{to}` here, and to `{other}` at {first.origin}",
        "keep one of the lines", (), name,
    )  # fmt: skip


def _differ(name: str, to: str, model: Model, group: Mapping[str, tuple[str, ...]]) -> Finding | None:
    """Return a finding if two tensors cannot be tied; None if they can."""
    one, other = model.by_name[name], model.by_name[to]
    if one.shape != other.shape:
        why = f"{name} is {shape_text(one.shape, one.dims)}, {to} is {shape_text(other.shape, other.dims)}"
        return Finding(
            "E304", f"`{name}` and `{to}` have different shapes", None, why,
            "tie tensors that are one in the model", (), name,
        )  # fmt: skip
    if model.modules and name not in group.get(to, ()):
        return Finding(
            "E304", f"`{name}` and `{to}` are two tensors in the module", None,
            "a tie says that two names are one tensor, and these two are trained apart",
            "drop the line, give it a condition (`if config.tie_word_embeddings ?? false`), or tie them in the model",
            (), name,
        )  # fmt: skip
    return None


def untied(plan: Plan, model: Model, placed: Mapping[str, Placed]) -> list[Finding]:
    """Return E304 for names that are one tensor in the module and have two layouts."""
    found = []
    for names in model.tied:
        held = [placed[name] for name in names if name in placed]
        for other in held[1:]:
            first = held[0]
            if (other.layout, other.stored, other.unit) == (first.layout, first.stored, first.unit):
                continue
            line = other.line or first.line
            layouts = [f"`{each.spec}` for {each.tensor.name}{_by(each.line)}" for each in (first, other)]
            one, two = first.tensor.name, other.tensor.name
            fix = f"add the line `tie {two} = {one}`"
            if plan.is_part:
                fix = f"give both the same cut, or drop the one of `{two}`: it is the same tensor"
            found.append(Finding(
                "E304", f"`{two}` and `{one}` are one tensor with two layouts", line.origin if line else None,
                f"the plan says {layouts[0]} and {layouts[1]}", fix, (), two,
            ))  # fmt: skip
    return found


def _by(line: Line | None) -> str:
    return f" by {line.origin}" if line is not None and line.origin is not None else ""
