"""``tie A = B``: which tensors take the layout of which, and whether the model agrees that they are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.line import Line, Tie
from shardtensor.plan.match.misfit import shape_text
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.match.patterns import OneOf, Pattern, pattern
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Placed


@attrs.frozen(eq=False)
class Ties:
    """By each tied name, the name whose layout it takes, and the line that says so."""

    to: Mapping[str, tuple[str, Tie]]
    findings: tuple[Finding, ...] = ()


def with_tied_names(plan: Plan, model: Model) -> Model:
    """`model` with the names that ties give its tensors, for files keep a tied tensor under one name."""
    missing = {}
    for tie in plan.ties:
        left, right = pattern(tie.pattern), pattern(tie.to)
        if not all(isinstance(part, OneOf) for part in left.wildcards):
            continue
        for values in product(*(part.options for part in left.wildcards if isinstance(part, OneOf))):
            name, to = left.filled(values), _partner(left, values, right)
            if to is not None and name not in model.by_name and to in model.by_name and name not in missing:
                missing[name] = attrs.evolve(model.by_name[to], name=name)
    if not missing:
        return model
    return attrs.evolve(model, tensors=(*model.tensors, *missing.values()))


def read_ties(plan: Plan, model: Model, tree: NameTree) -> Ties:
    """Find the partner of every name that a tie speaks of; model: with the names of `with_tied_names`."""
    found: dict[str, tuple[str, Tie]] = {}
    findings: list[Finding] = []
    group = {name: names for names in model.tied for name in names}
    for tie in plan.ties:
        left, right = pattern(tie.pattern), pattern(tie.to)
        for name in tree.tensors(tie.pattern):
            values = left.captures(name)
            if values is None:
                continue
            to = _partner(left, values, right)
            if to is None:
                findings.append(_unpaired(tie))
                break
            if to not in model.by_name or to == name:
                continue
            if name in found and found[name][0] != to:
                findings.append(_two_partners(name, to, *found[name], tie))
                continue
            fault = _differ(name, to, model, group)
            if fault is not None:
                findings.append(attrs.evolve(fault, origin=tie.origin))
                continue
            found[name] = to, tie
    for name in list(found):
        seen, at = [name], found[name][0]
        while at in found and at not in seen:
            seen.append(at)
            at = found[at][0]
        if at in seen:
            findings.append(_circle(seen, at, found[name][1]))
            found = {each: tie for each, tie in found.items() if each not in seen}
            break
        found[name] = at, found[name][1]
    return Ties(found, tuple(findings))


def _circle(names: Sequence[str], back: str, tie: Tie) -> Finding:
    circle = " = ".join(f"`{name}`" for name in (*names, back))
    fix = "tie all names to the one that has a rule"
    return Finding("E304", "ties go in a circle", tie.origin, circle, fix, (), names[0])


def _partner(left: Pattern, values: tuple[str, ...], right: Pattern) -> str | None:
    """What the right side stands for when the wildcards of the left stand for `values`; None when they do not pair."""
    given = list(zip(left.wildcards, values, strict=True))
    chosen = []
    for part in right.wildcards:
        at = next((i for i, (other, _) in enumerate(given) if type(other) is type(part)), None)
        if at is None:
            return None
        other, value = given.pop(at)
        if isinstance(part, OneOf) and isinstance(other, OneOf):
            if len(part.options) != len(other.options):
                return None
            value = part.options[other.options.index(value)]
        chosen.append(value)
    return right.filled(chosen)


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
    """Why two tensors cannot be tied; None when they can."""
    one, other = model.by_name[name], model.by_name[to]
    if one.shape != other.shape:
        why = f"{name} is {shape_text(one.shape, one.dims)}, {to} is {shape_text(other.shape, other.dims)}"
        return Finding(
            "E304",
            f"`{name}` and `{to}` have different shapes",
            None,
            why,
            "tie tensors that are one in the model",
            (),
            name,
        )
    if model.modules and name not in group.get(to, ()):
        return Finding(
            "E304", f"`{name}` and `{to}` are two tensors in the module", None,
            "a tie says that two names are one tensor, and these two are trained apart",
            "drop the line, give it a condition (`if config.tie_word_embeddings ?? false`), or tie them in the model",
            (), name,
        )  # fmt: skip
    return None


def untied(plan: Plan, model: Model, placed: Mapping[str, Placed]) -> list[Finding]:
    """E304 for names that are one tensor in the module and have two layouts."""
    found = []
    for names in model.tied:
        held = [placed[name] for name in names if name in placed]
        for other in held[1:]:
            first = held[0]
            if (other.layout, other.stored, other.unit) == (first.layout, first.stored, first.unit):
                continue
            line = other.line or first.line
            says = [f"`{each.spec}` for {each.tensor.name}{_by(each.line)}" for each in (first, other)]
            one, two = first.tensor.name, other.tensor.name
            found.append(
                Finding(
                    "E304",
                    f"`{two}` and `{one}` are one tensor with two layouts",
                    line.origin if line else None,
                    f"the plan says {says[0]} and {says[1]}",
                    f"give both the same cut, or drop the one of `{two}`: it is the same tensor"
                    if plan.is_part
                    else f"add the line `tie {two} = {one}`",
                    (),
                    two,
                )
            )
    return found


def _by(line: Line | None) -> str:
    return f" by {line.origin}" if line is not None and line.origin is not None else ""
