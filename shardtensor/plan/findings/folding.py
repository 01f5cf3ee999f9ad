"""Findings as people read them: those that repeat over layers in one, in the order of the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import attrs

from shardtensor.plan.findings.brief import below_layer, where, which
from shardtensor.plan.findings.finding import Finding

_LAYER = re.compile(r"\.\d+(?=\.)")


def folded(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Fold findings that say the same of several tensors, and order all by place: files, lines, columns.

    Example:
        >>> twice = [Finding("E205", "8 heads are not even", tensor=f"layers.{i}.{x}") for i in (0, 1) for x in "kv"]
        >>> folded(twice)[0].notes
        ('4 tensors fail in this way (layers 0-1, k and v)',)
    """
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_kind(finding), []).append(finding)
    return tuple(sorted(map(_one, groups.values()), key=_place))


def _kind(finding: Finding) -> object:
    origin = finding.origin
    where = (origin.source.file, origin.span) if origin is not None else None
    return finding.code, where, *(_without_names(text, finding.tensor) for text in (finding.fault, finding.fix))


def _without_names(text: str, own: str) -> str:
    """A text without the name it is about, and without the numbers of layers."""
    return _LAYER.sub(".#", text.replace(own, "") if own else text)


def _one(group: Sequence[Finding]) -> Finding:
    first = group[0]
    names = tuple(dict.fromkeys(finding.tensor for finding in group if finding.tensor))
    if len(names) < 2:
        return first
    verb = {"error": "fail in this way ", "warning": "", "note": ""}[first.severity]
    things = f"{len(names)} {'modules' if _is_of_modules(first) else 'tensors'}"
    count = f"{things} {verb}({where(names)})"
    fault = first.fault
    if f"`{first.tensor}`" in fault:  # the fault speaks of one: say what they have in common, and count them
        fault = fault.replace(f"`{first.tensor}`", f"`{below_layer(first.tensor)}`")
        count = f"{things}: {which(names)}"
    on_purpose = tuple(
        note for note in first.notes if note.startswith("to ")
    )  # a way to do so all the same, comes last
    notes = (*(note for note in first.notes if note not in on_purpose), count, *on_purpose)
    return attrs.evolve(first, fault=fault, notes=notes)


def _is_of_modules(finding: Finding) -> bool:
    return finding.code in ("E303", "E401", "E402", "E403") or finding.fault.startswith(
        ("`in", "`out", "`local", "`use")
    )


def _place(finding: Finding) -> tuple[str, int, int, str]:
    origin = finding.origin
    return ("", 0, 0, finding.code) if origin is None else (origin.source.file, *origin.span, finding.code)
