"""Findings as text, as JSON and as the workflow commands of GitHub; the same fields in each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from shardtensor.plan.findings.finding import Finding


def text_report(findings: Sequence[Finding]) -> str:
    """Every finding with its line and a caret, a blank line between two."""
    return "\n\n".join(map(str, findings))


def json_report(findings: Sequence[Finding], **more: Any) -> str:
    """One JSON object: ``findings``, a list with the fields of each, and what else is given."""
    return json.dumps({"findings": [fields(finding) for finding in findings], **more}, indent=2)


def github_report(findings: Iterable[Finding]) -> str:
    """One workflow command for each finding, which GitHub shows beside the line.

    Example:
        >>> print(github_report([Finding("W304", "no layout uses `dp`", why="100% the same work")]))
        ::warning title=W304::no layout uses `dp`%0Awhy: 100%25 the same work
    """
    commands = []
    for finding in findings:
        said = fields(finding)
        kind = {"error": "error", "warning": "warning", "note": "notice"}[finding.severity]
        where = {key: said[key] for key in ("file", "line", "col") if said[key]}
        where |= {"endColumn": said["end_col"]} if said["end_col"] and said["end_line"] == said["line"] else {}
        where["title"] = finding.code
        options = ",".join(f"{key}={_option(str(value))}" for key, value in where.items())
        rows = [finding.fault, *(f"{key}: {said[key]}" for key in ("why", "fix") if said[key])]
        rows += [f"note: {note}" for note in finding.notes]
        commands.append(f"::{kind} {options}::{_data(chr(10).join(rows))}")
    return "\n".join(commands)


def fields(finding: Finding) -> dict[str, Any]:
    """What a finding says, by name; places are counted from 1, and the end is one past the last character."""
    origin = finding.origin
    where: dict[str, Any] = {"file": "", "line": 0, "col": 0, "end_line": 0, "end_col": 0}
    if origin is not None:
        end = origin.span[1]
        text = origin.source.text
        where = {
            "file": origin.source.file,
            "line": origin.line,
            "col": origin.col,
            "end_line": text.count("\n", 0, end) + 1,
            "end_col": end - text.rfind("\n", 0, end),
        }
    return {
        "code": finding.code,
        "severity": finding.severity,
        **where,
        "fault": finding.fault,
        "why": finding.why,
        "fix": finding.fix,
        "notes": list(finding.notes),
        "tensor": finding.tensor,
    }


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _option(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
