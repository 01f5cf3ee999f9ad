"""The output of ``shardtensor show``, for the terminal or a page: the mesh, and a map of each distinct layout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html import escape
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardtensor.cli.scene import Scene, Shown, mesh_rows
from shardtensor.layout.explain import bytes_text
from shardtensor.layout.html import html_table
from shardtensor.layout.picture import EVERYBODY, WIDTH, Picture, character, colour
from shardtensor.spec.nodes import Spec

_BAR = 24
_OTHERS = 3


def rank_style(rank: int) -> str:
    """Return the colours of a rank."""
    return f"black on color({colour(rank)})"


def _drawn(rows: Sequence[Sequence[int | None]]) -> Text:
    text = Text()
    for line, row in enumerate(rows):
        text.append("\n" * (line > 0))
        for number in row:
            if number is None:
                text.append(" ")
            elif number == EVERYBODY:
                text.append("·", style="black on grey70")
            else:
                text.append(character(number), style=rank_style(number))
    return text


def print_scene(scene: Scene, out: Console | None = None) -> None:
    """Print a scene."""
    if out is None and not sys.stdout.isatty():  # without spaces at the ends of lines
        with (plain := Console(highlight=False, width=120)).capture() as caught:
            print_scene(scene, plain)
        print("\n".join(line.rstrip() for line in caught.get().splitlines()))
        return
    out = out or Console(highlight=False)
    out.print(Text.assemble((scene.title, "bold"), "   ", scene.subject), soft_wrap=True)
    out.print(scene.mesh_text, soft_wrap=True)
    out.print()
    if scene.costs is not None:
        from shardtensor.cli.plan_report import show_plan

        show_plan(scene.costs, out)
        out.print()
    out.print(_mesh_map(scene))
    most = max((each.rank_bytes(each.count) for each in scene.shown), default=0)
    printed: set[str] = set()
    for shown, *others in _alike(scene.shown):
        legend = _legend(shown.picture)
        out.print()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=WIDTH)
        grid.add_column()
        is_new = bool(shown.picture.axes) and legend.plain not in printed
        about = _about(shown, most, legend if is_new else None)
        drawn = _drawn(shown.picture.cells()) if all(shown.tensor.shape) else Text("no elements", style="dim")
        grid.add_row(drawn, Group(*about))
        out.print(grid)
        printed.add(legend.plain)
        more = [f"{_where(other)} alike: {', '.join(other.folded)}" for other in others[:_OTHERS]]
        more += [f"… and so on to {_where(others[-1])}"] if len(others) > _OTHERS else []
        for line in more:
            out.print(Text(" " * (WIDTH + 2) + line, style="dim"))


_PAGE = """<!DOCTYPE html>
<html>
<head>
<meta charset="UTF-8">
<title>{title}</title>
<style>
div {{ display: flex; gap: 3em; }}
th, td {{ text-align: left; padding-right: 2em; }}
pre {{ font-family: Menlo, 'DejaVu Sans Mono', consolas, monospace; }}
</style>
</head>
<body>
{comparison}
<div>
{columns}
</div>
</body>
</html>
"""


def page(*scenes: Scene) -> str:
    """Return scenes as one self-contained HTML page: the figures of their costs in a table, below it side by side."""
    columns = []
    for scene in scenes:
        out = Console(
            file=StringIO(), record=True, force_terminal=True, color_system="truecolor", width=140, highlight=False
        )
        print_scene(scene, out)
        columns.append(out.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))
    title = ", ".join(scene.title for scene in scenes)
    return _PAGE.format(title=escape(title), comparison=_comparison(scenes), columns="\n".join(columns))


def _comparison(scenes: Sequence[Scene]) -> str:
    if all(scene.costs is None for scene in scenes):
        return ""
    from shardtensor.cli.plan_report import figures

    found = [{} if scene.costs is None else figures(scene.costs) for scene in scenes]
    names = dict.fromkeys(name for each in found for name in each)
    rows = ((name, *(each.get(name) or "-" for each in found)) for name in names)
    return html_table("", ("", *(scene.title for scene in scenes)), rows)


def _alike(shown: Sequence[Shown]) -> list[list[Shown]]:
    """Return groups of layouts that differ only in the coordinate of ``only``."""
    found: dict[object, list[Shown]] = {}
    for each in shown:
        only = each.spec.only_part if isinstance(each.spec, Spec) else None
        text = str(each.spec) if only is None else str(each.spec).replace(str(only), only.axis)
        found.setdefault((text, each.tensor.shape, each.tensor.dtype, each.stored), []).append(each)
    return list(found.values())


def _where(shown: Shown) -> str:
    only = shown.spec.only_part if isinstance(shown.spec, Spec) else None
    return "elsewhere" if only is None else f"{only.axis} {only.index}"


def _mesh_map(scene: Scene) -> RenderableType:
    rows = mesh_rows(scene.axes)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    for _ in rows.columns:
        table.add_column(justify="right")
    table.add_row("", *(Text(label, style="dim") for label in rows.columns))
    for label, cells in rows.rows:
        table.add_row(label, *("…" if rank is None else f"{rank}" for rank in cells))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _about(shown: Shown, most: int, legend: Text | None) -> Iterator[RenderableType]:
    head = Text.assemble((str(shown.spec), "bold"))
    if shown.stored:
        head.append(f"   stored {shown.stored}")
    yield head.append(f"   {shown.size}", style="dim")
    for pattern, names in shown.folded.items():
        line = Text(pattern, overflow="fold")
        if len(names) > 1:
            line.append(f"  {len(names)} tensors", style="dim")
        if pattern in shown.tied:
            line.append(f"  is {shown.tied[pattern]}", style="dim")
        yield line
    yield Text(shown.held())
    if legend is not None:
        yield legend
    size = shown.rank_bytes(shown.count)
    eighths = round(8 * _BAR * size / most) if most else 0
    bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    of = f", of {shown.count} tensors" * (shown.count > 1)
    yield Text.assemble((bar or "▏", "cornflower_blue"), f" {bytes_text(size)} a rank{of}")


def _legend(picture: Picture) -> Text:
    text, few = Text(), len(picture.parts) <= 4
    for i, (number, meaning) in enumerate(picture.legend()):
        text.append("  " * (i > 0) + "… " * (i == 2 and not few))
        text.append(character(number), style=rank_style(number))
        text.append(meaning)
    return text
