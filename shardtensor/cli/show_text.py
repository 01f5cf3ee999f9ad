"""The output of ``shardtensor show``, for the terminal or a page: the mesh, and a map of each distinct layout."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

import attrs
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardtensor.layout.explain import bytes_text
from shardtensor.layout.html import html_table
from shardtensor.layout.picture import EVERYBODY, WIDTH, Picture, character, colour, picture_of
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.brief import brief_names
from shardtensor.plan.match.name_tree import NameTree
from shardtensor.plan.models.model import BYTES, TensorInfo
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.nodes import ShardingSpec, Spec

_BAR = 24
_OTHERS = 3


@attrs.frozen(eq=False)
class Shown:
    """Tensors of one layout, drawn once.

    Attributes:
        folded: patterns of the tensors' names, each with its names.
        spec: of the plan, in its axes.
        stored: the text of its `store` in the plan; empty if it is stored as in the computation.
        storing: the number of ranks over which the store is sharded.
        tied: for each pattern of tied names, the name of the tensor.
    """

    folded: Mapping[str, tuple[str, ...]]
    tensor: TensorInfo
    spec: ShardingSpec
    picture: Picture
    stored: str
    storing: int
    tied: Mapping[str, str]

    @property
    def count(self) -> int:
        """The number of tensors."""
        return sum(map(len, self.folded.values()))

    @property
    def item(self) -> int:
        """The bytes of an element."""
        return BYTES[self.tensor.dtype]

    @property
    def size(self) -> str:
        """The shape, with the names of its dims, and the dtype."""
        return f"{size_text(self.tensor.shape, self.tensor.dims)} {self.tensor.dtype}"

    def rank_bytes(self, count: int) -> int:
        """Return the bytes of `count` of the stored tensors on the rank that holds most."""
        return count * -(-self.picture.ends[1] // self.storing) * self.item

    def held(self) -> str:
        """Return as text the shard of one tensor on a rank, the axes of its copies, and its partial axes."""
        picture, layout = self.picture, self.picture.layout
        ends = sorted({*picture.ends})
        sizes = " to ".join(bytes_text(n * self.item) for n in ends)
        if picture.axes:
            shape = " × ".join(map(str, layout.local_shape(picture.ranks(0, 1)[0]))) if len(ends) == 1 else ""
            facts = [f"a rank holds {', '.join(filter(None, (shape, sizes)))}"]
            others = [axis for axis in range(len(layout.grid)) if axis not in picture.axes]
            if copies := [name for name, _ in picture.named_axes(others)]:
                facts.append(f"{picture.copies:,} copies, along {', '.join(copies)}")
        else:
            facts = [f"whole on {_ranks('each of ', len(layout.ranks))}, {sizes}"]
        if layout.partial:
            facts.append(f"partial along {', '.join(f'{picture.names[axis]} ({op})' for axis, op in layout.partial)}")
        return "; ".join(facts)


@attrs.frozen(eq=False)
class Scene:
    """All data that is shown.

    Attributes:
        title: the name of the plan.
        subject: its model.
        costs: its costs, as `shardtensor plan` prints them; None if they are not shown.
    """

    title: str
    subject: str
    resolved: Resolved
    shown: tuple[Shown, ...]
    costs: dict[str, Any] | None = None

    @property
    def axes(self) -> Axes:
        """The axes of the mesh."""
        return self.resolved.plan.axes

    @property
    def mesh_text(self) -> str:
        """``8 ranks (dp=2, tp=4)``, and the axes along which samples differ."""
        text = f"{_ranks('', self.axes.mesh.size)} {self.axes.mesh}"
        return text + (f"   samples differ along {', '.join(self.axes.data)}" if self.axes.data else "")


def scene_of_plan(resolved: Resolved, title: str, subject: str = "", *, pattern: str = "") -> Scene:
    """Return the scene of a plan.

    Args:
        pattern: only tensors that it matches, or below modules that it matches.
    """
    alike: dict[object, list[Placed]] = {}
    for name in NameTree(resolved.tensors, ()).tensors(pattern or "**"):
        each = resolved.tensors[name]
        alike.setdefault((str(each.spec), each.layout, each.tensor.dtype, str(each.stored or "")), []).append(each)
    shown = tuple(_shown(group, resolved.plan.axes) for group in alike.values())
    return Scene(title, subject, resolved, shown)


def size_text(shape: Sequence[int], names: Sequence[str] | None = None) -> str:
    """Return a shape as text, with the names of its dims if they are known.

    Example:
        >>> size_text((4096, 14336), ("out", "in")), size_text(())
        ('out 4096 × in 14336', 'scalar')
    """
    words = map(str, shape) if names is None else (f"{n} {size}" for n, size in zip(names, shape, strict=True))
    return " × ".join(words) or "scalar"


def _ranks(before: str, count: int) -> str:
    return f"{before * (count > 1)}{count:,} rank{'s' * (count != 1)}"


def _shown(group: Sequence[Placed], axes: Axes) -> Shown:
    first = group[0]
    by_name = {each.tensor.name: each for each in group}
    folded = brief_names(by_name)
    tied = {pattern: by_name[names[0]].tied_to for pattern, names in folded.items() if by_name[names[0]].tied_to}
    names = axes.mesh.names if isinstance(first.spec, Spec) else ()
    picture = picture_of(first.layout, names=names, made_of=axes.made_of)
    storing = 1 if first.stored is None else math.prod(map(axes.size, first.stored.axes))
    return Shown(folded, first.tensor, first.spec, picture, str(first.stored or ""), storing, tied)


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
    if scene.costs is not None:
        from shardtensor.cli.plan_report import show_plan

        out.print()
        show_plan(scene.costs, out)
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
    text, few = Text(), picture.count <= 4
    for i, (number, meaning) in enumerate(picture.legend()):
        text.append("  " * (i > 0) + "… " * (i == 2 and not few))
        text.append(character(number), style=rank_style(number))
        text.append(meaning)
    return text
