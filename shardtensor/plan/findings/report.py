"""Findings as text, as JSON and as the workflow commands of GitHub; the same fields in each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from shardtensor.plan.findings.brief import listed_briefly
from shardtensor.plan.findings.finding import Finding


def text_report(findings: Sequence[Finding]) -> str:
    """Return every finding with its line and a caret, and a blank line between two."""
    return "\n\n".join(map(str, findings))


def json_report(findings: Sequence[Finding], **more: Any) -> str:
    """Return a JSON object: ``findings``, a list with the fields of each, and the entries of `more`."""
    return json.dumps({"findings": [fields(finding) for finding in findings], **more}, indent=2)


def github_report(findings: Iterable[Finding]) -> str:
    """Return one workflow command for each finding; GitHub shows it beside the line.

    Example:
        >>> print(github_report([Finding("W304", "no layout uses `dp`", why="100% the same work")]))
        ::warning title=W304::no layout uses `dp`%0Awhy: 100%25 the same work
    """
    commands = []
    for finding in findings:
        values = fields(finding)
        kind = {"error": "error", "warning": "warning", "note": "notice"}[finding.severity]
        where = {key: values[key] for key in ("file", "line", "col") if values[key]}
        where |= {"endColumn": values["end_col"]} if values["end_col"] and values["end_line"] == values["line"] else {}
        where["title"] = finding.code
        options = (f"{key}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in where.items())
        text = _escaped("\n".join([finding.fault, *finding.rows]))
        commands.append(f"::{kind} {','.join(options)}::{text}")
    return "\n".join(commands)


def _escaped(text: object) -> str:
    return str(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def fields(finding: Finding) -> dict[str, Any]:
    """Return the fields of a finding by name; places count from 1, and the end is one past the last character."""
    origin = finding.origin
    where: dict[str, Any] = {"file": "", "line": 0, "col": 0, "end_line": 0, "end_col": 0}
    if origin is not None:
        end = attrs.evolve(origin, span=origin.span[1:] * 2)
        places = (origin.source.file, origin.line, origin.col, end.line, end.col)
        where = dict(zip(where, places, strict=True))
    texts = {key: getattr(finding, key) for key in ("fault", "why", "fix")}
    lists = {"notes": list(finding.notes), "tensor": finding.tensor}
    return {"code": finding.code, "severity": finding.severity, **where, **texts, **lists}


_LAYER = re.compile(r"\.\d+(?=\.)")


def folded(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge equal findings about several tensors, and sort all by place: files, lines, columns.

    Example:
        >>> twice = [Finding("E205", "8 heads are not even", tensor=f"layers.{i}.{x}") for i in (0, 1) for x in "kv"]
        >>> folded(twice)[0].notes
        ('found for 4 names: layers.{0..1}.{k,v}',)
    """
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_kind(finding), []).append(finding)
    return tuple(sorted(map(_one, groups.values()), key=_place))


def _kind(finding: Finding) -> object:
    """Return a key that findings share if they differ only in the tensor they are about and the numbers of layers."""
    origin, own = finding.origin, finding.tensor
    where = (origin.source.file, origin.span) if origin is not None else None
    texts = (text.replace(own, "") if own else text for text in (finding.fault, finding.fix))
    return finding.code, where, *(_LAYER.sub(".#", text) for text in texts)


def _one(group: Sequence[Finding]) -> Finding:
    first = group[0]
    names = tuple(dict.fromkeys(finding.tensor for finding in group if finding.tensor))
    if len(names) < 2:
        return first
    count = f"found for {len(names)} names: {listed_briefly(names, 2)}"
    on_purpose = tuple(note for note in first.notes if note.startswith("to "))  # comes last
    notes = (*(note for note in first.notes if note not in on_purpose), count, *on_purpose)
    return attrs.evolve(first, notes=notes)


def _place(finding: Finding) -> tuple[str, int, int, str]:
    origin = finding.origin
    return ("", 0, 0, finding.code) if origin is None else (origin.source.file, *origin.span, finding.code)
