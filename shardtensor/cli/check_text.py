"""The text output of ``shardtensor check``: findings, and the summary if there is no error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shardtensor.layout.explain import bytes_text
from shardtensor.plan.estimates.summary import OPTIMIZER
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.report import text_report


def print_findings(findings: Sequence[Finding]) -> None:
    """Print findings and their number."""
    if not findings:
        return
    print(f"{text_report(findings)}\n\n{counted(findings)}")


def counted(findings: Sequence[Finding]) -> str:
    """Return the number of findings of each severity, as text.

    Example:
        >>> counted([Finding("E301", "x"), Finding("N001", "y"), Finding("N002", "z")])
        '1 error, 2 notes'
    """
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(
        f"{counts[word]} {word}{'s' * (counts[word] != 1)}" for word in ("error", "warning", "note") if counts[word]
    )


def looked_at(ran: str) -> str:
    """Return as text what a check without errors has checked.

    Args:
        ran: the step that ran, in words; empty if none did.
    """
    return "text, layouts and one step checked" if ran else "text and layouts checked; no step ran"


def summary_text(summary: Mapping[str, Any], ran: str = "") -> str:
    """Return the summary of a plan as a few small tables."""
    ranks = f"{summary['world']:,} rank{'s' * (summary['world'] != 1)}"
    of = f" of {summary['model']}" if summary["model"] else ""
    layouts = [(row["layout"], f"{row['tensors']:,}", bytes_text(row["bytes"])) for row in summary["layouts"]]
    held = [
        (f"{name} ({OPTIMIZER})" if name == "optimizer" else name, *map(bytes_text, pair))
        for name, pair in summary["rank_bytes"].items()
    ]
    groups = [(row["axes"], f"{row['ranks']:,}", f"{row['groups']:,}") for row in summary["groups"]]
    lines = [
        f"{summary['plan']} on {ranks} {summary['mesh']}: {looked_at(ran)}",
        f"{summary['tensors']:,} tensors{of}, {summary['parameters']:,} parameters",
        *("", *_table(("layout", "tensors", "bytes"), layouts)),
        *("", *_table(("bytes of a rank", "least", "most"), held)),
        *(("", *_table(("process groups along", "ranks", "groups"), groups)) if groups else ()),
    ]
    if summary["fallbacks"]:
        lines += ["", "fallbacks taken", *(f"  {place}  {what}" for place, what in summary["fallbacks"])]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows under a head; the first column is aligned to the left, the others to the right."""
    shown = [head, *((f"  {row[0]}", *row[1:]) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in shown
    ]
