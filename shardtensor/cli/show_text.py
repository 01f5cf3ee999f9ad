"""What ``shardtensor show`` prints: the mesh, and a map of each distinct layout with the tensors that have it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardtensor.cli.mesh_rows import mesh_rows, mesh_text
from shardtensor.cli.picture import Picture, picture_of
from shardtensor.cli.scene import Reshard, Scene, Shown, plane_of, size_text
from shardtensor.layout.box import Box
from shardtensor.layout.explain import say_bytes, say_step
from shardtensor.layout.layout import Layout
from shardtensor.spec.nodes import Spec

WIDTH, HEIGHT = 16, 4
_COLOURS = (
    "cornflower_blue",
    "sandy_brown",
    "aquamarine3",
    "pink3",
    "khaki3",
    "light_salmon3",
    "sky_blue1",
    "medium_purple2",
)


def rank_style(rank: int) -> str:
    """The colours of a rank."""
    return f"black on {_COLOURS[rank % len(_COLOURS)]}"


def draw_boxes(
    shape: tuple[int, ...],
    boxes_by_rank: Sequence[Sequence[Box]],
    *,
    whole: str = " ",
    missing: str = "?",
    lines: int = 0,
) -> Text:
    """Draw a tensor, dim 0 down and dim 1 to the right (the others at their start), a cell for what lies there.

    A cell shows the rank that holds it, or is grey when all do; a rank without elements does not appear. Where dim 0 is
    not cut, one line stands for all.

    Args:
        whole: what stands in a cell that all ranks hold.
        missing: what stands in a cell that none of them holds.
        lines: how tall the map is; by default 4, or 8 where many ranks lie one below the other.

    Example:
        >>> boxes = [[Box((0, 0), (2, 4))], [Box((2, 0), (2, 4))]]
        >>> print(draw_boxes((4, 4), boxes).plain)
        0000
        0000
        1111
        1111
    """
    rows = shape[0] if len(shape) > 1 else 1
    columns = shape[1] if len(shape) > 1 else shape[0] if shape else 1
    height, width = min(rows, lines or max(HEIGHT, min(len(boxes_by_rank), 2 * HEIGHT))), min(columns, WIDTH)
    if len({box.offsets[0] for boxes in boxes_by_rank for box in boxes if box.numel} if shape else ()) <= 1:
        height = 1  # nothing is cut along dim 0
    text = Text()
    for line in range(height):
        if line:
            text.append("\n")
        for cell in range(width):
            row, column = line * rows // height, cell * columns // width
            at = (row, column, *[0] * (len(shape) - 2)) if len(shape) > 1 else (column,) if shape else ()
            holders = [rank for rank, boxes in enumerate(boxes_by_rank) if any(_holds(box, at) for box in boxes)]
            if len(holders) == len(boxes_by_rank):
                text.append(whole, style="black on grey70")
            elif holders:
                text.append(_digit(holders[0]), style=rank_style(holders[0]))
            else:
                text.append(missing)
    return text


def _holds(box: Box, at: tuple[int, ...]) -> bool:
    return all(offset <= i < offset + size for offset, size, i in zip(box.offsets, box.sizes, at, strict=True))


def _digit(rank: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvwxyz"[rank % 36]


PARTS = 16
"""Of one map: as many as it has columns or, at most, lines."""

_BAR = 24
_OTHERS = 3
_CHARACTERS = 36


def console() -> Console:
    """A console as wide as the terminal; wide enough for every line where there is none."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)


def print_scene(scene: Scene, out: Console | None = None) -> None:
    """Print a scene."""
    if out is None and not sys.stdout.isatty():  # no spaces at the ends of lines that nobody fills
        with (plain := console()).capture() as caught:
            print_scene(scene, plain)
        print("\n".join(line.rstrip() for line in caught.get().splitlines()))
        return
    out = out or console()
    out.print(Text.assemble((scene.title, "bold"), "   ", scene.subject), soft_wrap=True)
    out.print(_mesh_line(scene), soft_wrap=True)
    out.print()
    out.print(_mesh_map(scene))
    most = max((each.rank_bytes(len(each.names)) for each in scene.shown), default=0)
    told: set[str] = set()
    for shown, *others in _dealt(scene.shown):
        legend = _legend(shown.picture)
        out.print()
        out.print(_layout(shown, most, None if legend.plain in told else legend, is_plan=scene.resolved is not None))
        told.add(legend.plain)
        for other in others[:_OTHERS]:
            out.print(Text(" " * (WIDTH + 2) + f"{_where(other)} alike: {', '.join(other.folded)}", style="dim"))
        if len(others) > _OTHERS:
            out.print(Text(" " * (WIDTH + 2) + f"… and so on to {_where(others[-1])}", style="dim"))
    for reshard in scene.reshards:
        out.print()
        out.print(_reshard(reshard))


def _dealt(shown: Sequence[Shown]) -> list[list[Shown]]:
    """Layouts that differ only in the coordinate that holds them, together."""
    found: dict[object, list[Shown]] = {}
    for each in shown:
        spec = each.spec
        only = spec.only_part if isinstance(spec, Spec) else None
        text = str(spec) if only is None else str(spec).replace(str(only), only.axis)
        found.setdefault((text, each.tensor.shape, each.tensor.dtype, each.stored), []).append(each)
    return list(found.values())


def _where(shown: Shown) -> str:
    only = shown.spec.only_part if isinstance(shown.spec, Spec) else None
    return "elsewhere" if only is None else f"{only.axis} {only.index}"


def _mesh_line(scene: Scene) -> Text:
    axes = scene.axes
    count = axes.mesh.size
    text = Text.assemble((f"{count:,} rank{'s' * (count != 1)}", "bold"))
    if not axes.mesh.is_unnamed:
        text.append(f" = {mesh_text(axes)}")
    if axes.data:
        text.append(f"   samples differ along {', '.join(axes.data)}", style="dim")
    return text


def _mesh_map(scene: Scene) -> RenderableType:
    rows = mesh_rows(scene.axes)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    for _ in rows.columns:
        table.add_column(justify="right")
    if not scene.axes.mesh.is_unnamed:
        table.add_row("", *(Text(label, style="dim") for label in rows.columns))
    for label, cells in rows.rows:
        table.add_row(label.replace("*", ""), *("…" if rank is None else f"{rank}" for rank in cells))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _layout(shown: Shown, most: int, legend: Text | None, is_plan: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=WIDTH)
    grid.add_column()
    grid.add_row(_map(shown.layout, shown.picture), Group(*_about(shown, most, legend, is_plan)))
    return grid


def _map(layout: Layout, picture: Picture) -> Text:
    coarse = _coarse(picture)
    return _map_of(layout.shape, {coarse.key(i): part.boxes for i, part in enumerate(coarse.parts)})


def _map_of(shape: tuple[int, ...], held_by: dict[int, tuple[Box, ...]]) -> Text:
    """The map of boxes, each in the colour and with the character of its number."""
    plane = plane_of(shape, [box for boxes in held_by.values() for box in boxes])
    if plane is None or not all(shape):
        return Text("too fine to draw" if plane is None else "no elements", style="dim")
    boxes = (
        [held_by[i] for i in held_by] if len(held_by) == 1 else [held_by.get(i, ()) for i in range(max(held_by) + 1)]
    )
    text = Text()
    for number in range(min(len(plane.titles), PARTS)):
        held: list[list[Box]] = []
        for each in boxes:
            rects = [rect for rect in plane.rects(each) if rect.plane == number]
            held.append([Box((r.top, r.left), (r.bottom - r.top, r.right - r.left)) for r in rects])
        if number:
            text.append("\n\n")
        tops = {box.offsets[0] for each in held for box in each}
        lines = min(plane.height, PARTS, max(HEIGHT, len(tops)))
        text.append_text(draw_boxes((plane.height, plane.width), held, whole="·", missing=" ", lines=lines))
    return text


def _coarse(picture: Picture) -> Picture:
    if len(picture.parts) <= PARTS:
        return picture
    return picture_of(picture.layout, PARTS, picture.names, picture.made_of)


def _about(shown: Shown, most: int, legend: Text | None, is_plan: bool) -> Iterator[RenderableType]:
    tensor, picture = shown.tensor, shown.picture
    head = Text.assemble((str(shown.spec), "bold"))
    if shown.stored:
        head.append(f"   stored {shown.stored}")
    head.append(f"   {size_text(tensor.shape, tensor.dims)} {tensor.dtype}", style="dim")
    yield head
    if is_plan:
        for pattern, names in shown.folded.items():
            line = Text(pattern, overflow="fold")
            if len(names) > 1:
                line.append(f"  {len(names)} tensors", style="dim")
            if pattern in shown.tied:
                line.append(f"  is {shown.tied[pattern]}", style="dim")
            yield line
    yield Text(_held(shown))
    if legend and picture.axes:
        yield legend
    count = len(shown.names)
    size = shown.rank_bytes(count)
    if is_plan:
        yield _bar(size, most).append(f" {say_bytes(size)} a rank{f', of {count} tensors' * (count > 1)}")


def _held(shown: Shown) -> str:
    """What one rank holds, and where the copies are."""
    picture, layout = shown.picture, shown.layout
    if layout.partial:
        addends = ", ".join(f"{picture.names[axis]} ({op})" for axis, op in layout.partial)
        yet = f"; not yet joined along {addends}"
    else:
        yet = ""
    least = min(part.least for part in picture.parts)
    sizes = sorted({least, shown.most})
    of_each = " to ".join(say_bytes(n * shown.item) for n in sizes)
    first = picture.parts[0]
    if not picture.axes:
        ranks = len(layout.ranks)
        return f"whole on {'each of ' * (ranks > 1)}{ranks:,} rank{'s' * (ranks != 1)}, {of_each}{yet}"
    local = " × ".join(map(str, layout.local_shape(first.rank))) if least == shown.most else ""
    copies = [name for name, _ in picture.told([axis for axis in range(len(layout.grid)) if axis not in picture.axes])]
    also = f"; {picture.copies:,} copies, along {', '.join(copies)}" if copies else ""
    return f"a rank holds {local + ', ' if local else ''}{of_each}{also}{yet}"


def _legend(picture: Picture) -> Text:
    """What the characters of a map stand for: the first few, and the last."""
    coarse = _coarse(picture)
    text = Text()
    parts = coarse.parts
    shown = range(len(parts)) if len(parts) <= 4 else (0, 1, len(parts) - 1)
    for i in shown:
        if text:
            text.append("  … " if i - 1 not in shown else "  ")
        part = parts[i]
        ranks, count = coarse.ranks(part, 2)
        text.append(_character(coarse.key(i)), style=rank_style(coarse.key(i)))
        names = "" if picture.names == ("place",) else f" {coarse.place_text(part)},"
        more = ", …" if count > len(ranks) else ""
        text.append(f"{names} rank{'s' * (count > 1)} {', '.join(map(str, ranks))}{more}")
        if not part.most:
            text.append(" (nothing)")
    return text


def _character(i: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvwxyz"[i % _CHARACTERS]


def _bar(size: int, most: int) -> Text:
    eighths = round(8 * _BAR * size / most) if most else 0
    bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    return Text.assemble((bar or "▏", "cornflower_blue"))


def _reshard(reshard: Reshard) -> RenderableType:
    """The steps by which a tensor reaches other layouts."""
    lines: list[RenderableType] = []
    for texts, steps in zip(zip(reshard.texts, reshard.texts[1:], strict=False), reshard.routes, strict=True):
        lines.append(Text.assemble((" -> ".join(texts), "bold")).append(f"   {reshard.name}", style="dim"))
        lines += [Text(f"  {say_step(step, reshard.item)}") for step in steps] or [Text("  nothing moves")]
    return Group(*lines)
