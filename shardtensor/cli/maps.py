"""Maps of tensors for the terminal: each rank's boxes in its colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from shardtensor.layout.box import Box

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
