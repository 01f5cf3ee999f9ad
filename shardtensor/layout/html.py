"""A table as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

ROWS = 50
"""The most rows of a table."""


def html_table(title: str, head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as HTML; of more than `ROWS` rows the first, and the number of the others.

    Example:
        >>> html_table("a < b", ["layout"], [["[tp, -]"]])
        '<table><caption>a &lt; b</caption><tr><th>layout</th></tr><tr><td>[tp, -]</td></tr></table>'
    """
    rows = [*rows]
    shown = [*rows[:ROWS], *([[f"{len(rows) - ROWS} more"]] if len(rows) > ROWS else [])]

    def line(tag: str, cells: Iterable[object]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(each))}</{tag}>' for each in cells)}</tr>"

    lines = [line("th", head), *(line("td", row) for row in shown)]
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"
