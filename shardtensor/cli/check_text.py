"""The text output of ``shardtensor check``: findings, and the summary if there is no error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtensor.layout.explain import bytes_text
from shardtensor.plan.estimates.memory import plan_bytes
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.report import text_report
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.nodes import Spec

OPTIMIZER = "adamw"


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


def summarize(resolved: Resolved, path: str | Path) -> dict[str, Any]:
    """Return the summary of a plan without errors.

    Args:
        path: the name of the plan in messages.

    Returns:
        the names of the plan, the model and the mesh; the numbers of tensors, tied ones once, and of elements of
        parameters; the layouts, the largest first, each with the number of its tensors and their global bytes; the
        bytes of the emptiest and the fullest rank.
    """
    plan, own = resolved.plan, own_tensors(resolved)
    held = plan_bytes(resolved, optimizer=OPTIMIZER)
    layouts: dict[str, list[int]] = {}
    for placed in own:
        count = layouts.setdefault(_layout_text(placed), [0, 0])
        count[0] += 1
        count[1] += placed.tensor.bytes
    return {
        "plan": str(path),
        "model": resolved.model.source,
        "mesh": str(plan.axes.mesh),
        "world": plan.world,
        "tensors": len(own),
        "parameters": sum(placed.tensor.numel for placed in own if not placed.tensor.is_buffer),
        "layouts": [
            {"layout": text, "tensors": tensors, "bytes": size}
            for text, (tensors, size) in sorted(layouts.items(), key=lambda item: -item[1][1])
        ],
        "rank_bytes": {
            name: (getattr(held.least, name), getattr(held.most, name))
            for name in ("parameters", "gradients", "optimizer", "buffers")
        },
    }


def _layout_text(placed: Placed) -> str:
    """Return a layout and its store as text; ``only`` has ``*`` as its coordinate, so that all experts are one."""
    text, only = str(placed.spec), placed.spec.only_part if isinstance(placed.spec, Spec) else None
    if only is not None:
        text = text.replace(str(only), f"only({only.axis}, *)")
    return text if placed.stored is None else f"{text} {placed.stored}"


def summary_text(summary: Mapping[str, Any], ran: str = "") -> str:
    """Return the summary of a plan as a few small tables."""
    ranks = f"{summary['world']:,} rank{'s' * (summary['world'] != 1)}"
    of = f" of {summary['model']}" if summary["model"] else ""
    layouts = [(row["layout"], f"{row['tensors']:,}", bytes_text(row["bytes"])) for row in summary["layouts"]]
    held = [
        (f"{name} ({OPTIMIZER})" if name == "optimizer" else name, *map(bytes_text, pair))
        for name, pair in summary["rank_bytes"].items()
    ]
    lines = [
        f"{summary['plan']} on {ranks} {summary['mesh']}: {looked_at(ran)}",
        f"{summary['tensors']:,} tensors{of}, {summary['parameters']:,} parameters",
        *("", *_table(("layout", "tensors", "bytes"), layouts)),
        *("", *_table(("bytes of a rank", "least", "most"), held)),
    ]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows under a head; the first column is aligned to the left, the others to the right."""
    shown = [head, *((f"  {row[0]}", *row[1:]) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in shown
    ]
