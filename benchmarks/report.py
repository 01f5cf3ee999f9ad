"""Print a benchmark's rows as a table and write them as JSON beside it."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def write(name: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Show `rows` and keep them in ``results/<name>.json`` with the machine they were measured on."""
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=160).print(table)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"torch": torch.__version__, "device": device, **facts, "rows": list(rows)}, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n")
