"""The output of ``shardtensor show``, for the terminal or a page: the mesh, and a map of each distinct layout."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardtensor.cli.picture import PARTS, Picture
from shardtensor.cli.scene import Scene, Shown, mesh_rows
from shardtensor.layout.box import Box
from shardtensor.layout.explain import bytes_text
from shardtensor.spec.nodes import Spec

WIDTH, HEIGHT = 16, 4
_COLOURS = "cornflower_blue sandy_brown aquamarine3 pink3 khaki3 light_salmon3 sky_blue1 medium_purple2".split()
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_BAR = 24
_OTHERS = 3


def rank_style(rank: int) -> str:
    """Return the colours of a rank."""
    return f"black on {_COLOURS[rank % len(_COLOURS)]}"


def draw_boxes(
    shape: tuple[int, ...],
    boxes_by_rank: Sequence[Sequence[Box]],
    *,
    split: int = 1,
    whole: str = " ",
    missing: str = "?",
    lines: int = 0,
) -> Text:
    """Draw a tensor as a grid of cells, row by row, its first dims down and the others to the right.

    A cell shows the rank that holds it, or is grey if all do; a rank without elements does not appear. If no dim that
    goes down is sharded, one line is drawn for all.

    Args:
        split: the number of dims that go down; none for a vector.
        whole: the text of a cell that all ranks hold.
        missing: the text of a cell that no rank holds.
        lines: the height of the map; by default 4, or up to 8 for more ranks.

    Example:
        >>> boxes = [[Box((0, 0), (2, 4))], [Box((2, 0), (2, 4))]]
        >>> print(draw_boxes((4, 4), boxes).plain)
        0000
        0000
        1111
        1111
    """
    split = split if len(shape) > 1 else 0
    rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
    height, width = min(rows, lines or max(HEIGHT, min(len(boxes_by_rank), 2 * HEIGHT))), min(columns, WIDTH)
    if len({box.offsets[:split] for boxes in boxes_by_rank for box in boxes if box.numel}) <= 1:
        height = 1
    text = Text()
    for line in range(height):
        if line:
            text.append("\n")
        for cell in range(width):
            at = (*_index(line * rows // height, shape[:split]), *_index(cell * columns // width, shape[split:]))
            holders = [rank for rank, boxes in enumerate(boxes_by_rank) if any(_holds(box, at) for box in boxes)]
            if len(holders) == len(boxes_by_rank):
                text.append(whole, style="black on grey70")
            elif holders:
                text.append(_character(holders[0]), style=rank_style(holders[0]))
            else:
                text.append(missing)
    return text


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element at a place of a row-major tensor."""
    found = []
    for size in reversed(shape):
        place, i = divmod(place, size)
        found.append(i)
    return tuple(reversed(found))


def _holds(box: Box, at: tuple[int, ...]) -> bool:
    return all(offset <= i < offset + size for offset, size, i in zip(box.offsets, box.sizes, at, strict=True))


def _character(i: int) -> str:
    return _CHARACTERS[i % len(_CHARACTERS)]


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
        grid.add_row(_map(shown), Group(*about))
        out.print(grid)
        printed.add(legend.plain)
        more = [f"{_where(other)} alike: {', '.join(other.folded)}" for other in others[:_OTHERS]]
        more += [f"… and so on to {_where(others[-1])}"] if len(others) > _OTHERS else []
        for line in more:
            out.print(Text(" " * (WIDTH + 2) + line, style="dim"))


def page(scene: Scene) -> str:
    """Return a scene as one self-contained HTML page."""
    out = Console(
        file=StringIO(), record=True, force_terminal=True, color_system="truecolor", width=140, highlight=False
    )
    print_scene(scene, out)
    return out.export_html(inline_styles=True)


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


def _map(shown: Shown) -> Text:
    """Return the map of a layout, each part in the colour and with the character of its number."""
    picture, shape = shown.picture, shown.tensor.shape
    if not all(shape):
        return Text("no elements", style="dim")
    held = {picture.number(i): [box for box in part.boxes if box.numel] for i, part in enumerate(picture.parts)}
    boxes = [held.get(i, []) for i in range(max(held) + 1)] if len(held) > 1 else [*held.values()]
    split = max((_last_cut(box.sizes, shape) for each in boxes for box in each), default=0) or 1
    down = {(box.offsets[:split], box.sizes[:split]) for each in boxes for box in each}
    rows = sum(math.prod(sizes[: _last_cut(sizes, shape)]) for _, sizes in down)  # one below the other
    lines = min(PARTS, max(HEIGHT, rows))
    return draw_boxes(shape, boxes, split=split, whole="·", missing=" ", lines=lines)


def _last_cut(sizes: Sequence[int], shape: Sequence[int]) -> int:
    """Return the last dim along which a box is smaller than the tensor; 0 if there is none."""
    return max((dim for dim, size in enumerate(sizes) if size != shape[dim]), default=0)


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
    """Return the meaning of the characters of a map: the first few, and the last."""
    text = Text()
    parts = picture.parts
    shown = range(len(parts)) if len(parts) <= 4 else (0, 1, len(parts) - 1)
    for i in shown:
        if text:
            text.append("  … " if i - 1 not in shown else "  ")
        part, number = parts[i], picture.number(i)
        ranks, count = picture.ranks(part, 2)
        text.append(_character(number), style=rank_style(number))
        names = "" if picture.names == ("place",) else f" {picture.place_text(part)},"
        more = ", …" if count > len(ranks) else ""
        text.append(f"{names} rank{'s' * (count > 1)} {', '.join(map(str, ranks))}{more}")
        if not part.most:
            text.append(" (nothing)")
    return text
