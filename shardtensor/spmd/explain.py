"""The text of a compiled step: what each value is, the user's line that computes it, and what ranks send."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.rules.batch import BatchValue

c10d: Any = torch.ops._c10d_functional


def explained(built: Any) -> str:
    """Return one line for each operation of a rank's graph.

    Args:
        built: what the builder made last.
    """
    part = built.part
    lines = [f"rank's part: {part.own} of {part.total} samples, from {part.start}"]
    rows = []
    for node in built.graph.nodes:
        if node.op == "output":
            continue
        value = built.local.values.get(node)
        what = str(value) if isinstance(value, BatchValue) else ""
        target = node.name if node.op != "call_function" else str(node.target).removeprefix("aten.")
        rows.append((target, what, str((node.meta.get("custom") or {}).get("where", ""))))
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    lines += [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return "\n".join(lines)
