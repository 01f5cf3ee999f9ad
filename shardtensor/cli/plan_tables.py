"""The tables of ``shardtensor plan``."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from shardtensor.layout.explain import say_bytes

_BYTES = ("parameters", "gradients", "optimizer", "buffers", "gathered", "activations", "total")


def show_plan(report: dict[str, Any]) -> None:
    """Print a plan's report."""
    console = _console()
    _say_head(console, report)
    memory = report["memory"]
    columns = {"every rank": memory["most"]}
    if memory["most"]["total"] != memory["least"]["total"]:
        columns = {f"the {name}, rank {memory[name]['rank']}": memory[name] for name in ("most", "least")}
    if "rank" in memory:
        columns[f"rank {memory['rank']['rank']}"] = memory["rank"]
    table = _table("bytes of a rank", "of", *columns)
    for name in _BYTES:
        if any(held[name] for held in columns.values()):
            table.add_row(name, *(say_bytes(held[name], 2) for held in columns.values()))
    console.print(table)
    needed, room = say_bytes(memory["most"]["total"], 2), say_bytes(report["memory_bytes"], 2)
    if report["fits"]:
        console.print(f"fits into {room}\n", highlight=False)
    else:
        console.print(f"does not fit: a rank needs {needed} of {room}\n", style="bold red", highlight=False)
    if "step" not in report:
        console.print(
            f"the step is not counted: {report['not_counted']}", highlight=False, markup=False, soft_wrap=True
        )
        return
    table = _table(
        "collectives of a step", "when", "collective", "over", "calls", "received", "each", "together", "where"
    )
    for row in report["collectives"]:
        over = f"{row['over']}={row['group_size']}"
        times = say_seconds(row["seconds_each"]), say_seconds(row["seconds"])
        received = say_bytes(row["received_bytes"], 2)
        where = row["where"] or "the model"
        table.add_row(row["phase"], row["kind"], over, f"{row['calls']:,}", received, *times, where)
    console.print(table)
    step = report["step"]
    console.print(
        f"a step  {say_seconds(step['seconds'])} estimated: {report['flops']:.3g} FLOPs "
        f"{say_seconds(step['compute_s'])}, beside them {say_seconds(step['beside_s'])} of collectives along data "
        f"axes; in modules {say_seconds(step['inside_s'])}; optimizer {say_seconds(step['optimizer_s'])}",
        highlight=False,
    )
    console.print(f"        {step['tokens_per_s']:,.0f} tokens a second", highlight=False)


def show_search(report: dict[str, Any]) -> None:
    """Print the meshes that a search found."""
    console = _console()
    _say_head(console, report)
    passed = [row for row in report["choices"] if not row["fault"]]
    if "not_counted" in report:
        console.print(f"the step is not counted: {report['not_counted']}", highlight=False, markup=False)
        table = _table("meshes, the fewest bytes first", "values", "mesh", "bytes")
        for row in passed:
            table.add_row(row["values"], row["mesh"], say_bytes(row["bytes"], 2))
    else:
        table = _table(
            "meshes, the shortest step first", "values", "mesh", "step", "tokens/s", "in modules", "beside", "bytes"
        )
        for row in passed:
            step = row["step"]
            times = (say_seconds(step[key]) for key in ("inside_s", "beside_s"))
            table.add_row(
                row["values"], row["mesh"], say_seconds(step["seconds"]), f"{step['tokens_per_s']:,.0f}", *times,
                say_bytes(row["bytes"], 2),
            )  # fmt: skip
    if table.row_count:
        console.print(table)
    else:
        console.print("no mesh passes", style="bold red")
    refused: dict[str, list[str]] = {}
    for row in report["choices"]:
        if row["fault"]:
            refused.setdefault(row["fault"], []).append(row["values"])
    for fault, values in refused.items():
        more = f" and {len(values) - 3} more" if len(values) > 3 else ""
        console.print(f"not {'; '.join(values[:3])}{more}: {fault}", style="dim", highlight=False, markup=False)


def say_seconds(seconds: float) -> str:
    """A time as people read it.

    Example:
        >>> say_seconds(0), say_seconds(0.0000123), say_seconds(0.5), say_seconds(75)
        ('-', '12.3 us', '500 ms', '75 s')
    """
    if not seconds:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)


def _say_head(console: Console, report: dict[str, Any]) -> None:
    of = "  ".join(filter(None, (report["plan"], report["model"])))
    parts = report.get("data_ranks", 1)
    dealt = f" ({report['batch'] // parts} on each of {parts} data ranks)" if parts > 1 else ""
    console.print(
        f"{of}  {report['parameters']:,} parameters on {report['world']} ranks {report.get('mesh', '')}  "
        f"{report['batch']} x {report['seq']} tokens a step{dealt}, {report['dtype']}, {report['optimizer']}, "
        f"{report['hardware']}\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="bold")
    left = {"of", "when", "collective", "over", "where", "why", "values", "mesh"}
    for column in columns:
        table.add_column(column, no_wrap=column not in ("where", "why"), overflow="fold")
        table.columns[-1].justify = "left" if column in left else "right"
    return table
