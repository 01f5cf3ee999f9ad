"""How values pass each module: the flows, hooks and local attributes that lines give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.places import name_place
from shardtensor.plan.flows.flow import Flow
from shardtensor.plan.line import Hook, Line
from shardtensor.plan.match.binding import Binder
from shardtensor.plan.match.matching import Disputes, Matches
from shardtensor.plan.models.model import Model, ModuleInfo, TensorInfo
from shardtensor.plan.resolved import Passing
from shardtensor.spec.diagnostics import nearest


def passings(
    model: Model, matches: Matches, disputes: Disputes, binder: Binder
) -> tuple[dict[str, Passing], list[Finding]]:
    """What the plan says of each module that it speaks of, and E303 for what the module does not have."""
    found: dict[str, Passing] = {}
    findings: list[Finding] = []
    alike: dict[tuple[int, ...], Passing] = {}  # of modules of which the same lines speak, each of another thing
    for path, lines in matches.by_module.items():
        info = model.modules.get(path)
        spoken = tuple(map(id, lines))
        if spoken in alike and info is None:
            found[path] = alike[spoken]
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
        found[path] = Passing(ins, outs, tuple(uses), locals_)
        if len(by_what) == len(lines):
            alike[spoken] = found[path]
    return found, findings


def _by_what(lines: Any) -> Mapping[str, list[Line]]:
    """Lines that speak of one thing, by its words: ``in mask``, ``local num_heads``."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        name = line.value.name if line.kind == "use" else line.name
        found.setdefault(f"{line.kind} {name}".strip(), []).append(line)
    return found


def _meaning(value: Any) -> object:
    return (value.name, value.args, dict(value.kwargs)) if isinstance(value, Hook) else value


def _missing(line: Line, path: str, info: ModuleInfo | None) -> Finding | None:
    """Why a module has not what a line names; None when it has, or when that is not known."""
    if info is None or not line.name or line.kind not in ("in", "local"):
        return None
    if line.kind == "in":
        if not info.arguments or line.name in info.arguments or any(name.startswith("*") for name in info.arguments):
            return None
        fault = f"`forward` of {info.class_name} has no argument `{line.name}`"
        known, has, what = list(info.arguments), "takes", "one of them, or write `in` alone"
    else:
        if line.name in info.counts:
            return None
        fault = f"{info.class_name} has no attribute `{line.name}` that counts something"
        known, has, what = sorted(info.counts), "has", "a whole number that forward reads from self"
    why = f"{path or 'the module'} is a {info.class_name}, and {has} {', '.join(known) or 'none'}"
    fix = nearest(line.name, known) or f"name {what}"
    return Finding("E303", fault, name_place(line), why, fix, (), path)


def _uneven(line: Line, path: str, count: int, binder: Binder) -> Finding | None:
    info = TensorInfo(f"{path}.{line.name}" if path else line.name, (count,))
    bound = binder.bound(line.value, info)
    if bound is None or bound.error is None:
        return None
    found = binder.finding(bound, info, line)
    return attrs.evolve(found, fault=f"`local {line.name}`: {found.fault}")
