"""A tensor as SVG: the boxes of its parts, to scale within limits, with its dims along the edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from shardtensor.cli.page.colours import fill
from shardtensor.cli.page.markup import Markup, el, px
from shardtensor.cli.picture import Part, Picture
from shardtensor.cli.plane import Plane, Rect, plane_of

WIDE, TALL = 560, 330
FLAT, THIN = 90, 110
"""The least height and width of two dims; of longer ones the aspect is not kept."""

_LINE = 64
_LEFT, _TOP, _RIGHT, _BOTTOM = 72, 40, 12, 14
_GAP = 16
_TICKS = 9
_WORDS = 4  # of one part, where it has several boxes


@attrs.frozen
class Frame:
    """Where the elements of a plane lie on the paper.

    Attributes:
        plane: what is drawn.
        columns: planes beside one another.
        width, height: of one of them.
        is_to_scale: whether both dims have one scale.
    """

    plane: Plane
    columns: int
    width: float
    height: float
    is_to_scale: bool

    def place(self, rect: Rect) -> tuple[float, float, float, float]:
        """Left, top, width and height on the paper."""
        row, column = divmod(rect.plane, self.columns)
        across, down = self.width / max(self.plane.width, 1), self.height / max(self.plane.height, 1)
        return (
            column * (self.width + _GAP) + rect.left * across,
            row * (self.height + _GAP) + rect.top * down,
            (rect.right - rect.left) * across,
            (rect.bottom - rect.top) * down,
        )

    @property
    def size(self) -> tuple[float, float]:
        """Of all planes together."""
        rows = -(-len(self.plane.titles) // self.columns)
        return (
            self.columns * (self.width + _GAP) - _GAP,
            rows * (self.height + _GAP) - _GAP,
        )


def frame_of(plane: Plane, wide: float = WIDE, tall: float = TALL, flat: float = FLAT, thin: float = THIN) -> Frame:
    """Choose the scale of a drawing.

    Example:
        >>> frame = frame_of(Plane((400, 200), 0, 1, (), 400, 200))
        >>> frame.width, frame.height, frame.is_to_scale
        (165.0, 330, True)
    """
    columns = min(len(plane.titles), 4)
    wide = (wide - _GAP * (columns - 1)) / columns
    if plane.down is None:
        return Frame(plane, columns, wide, min(_LINE, tall), True)
    ratio = plane.height / max(plane.width, 1)
    height = wide * ratio
    width = wide
    if height > tall:
        width, height = tall / ratio, tall
    fitted = Frame(plane, columns, max(width, thin / columns), max(height, flat / columns), True)
    return attrs.evolve(fitted, is_to_scale=(fitted.width, fitted.height) == (width, height))


def drawing(picture: Picture, plane: Plane, names: Sequence[str] | None, labels: Sequence[str]) -> Markup:
    """The drawing of a layout; each part can be pointed at and reached with the keys.

    Args:
        names: of the tensor's dims.
        labels: for each part, all that is to be said of it.
    """
    frame = frame_of(plane)
    width, height = frame.size
    parts = [
        _part(picture, i, part, frame, labels[i])
        for i, part in enumerate(picture.parts)
        if part.most or len(picture.parts) == 1
    ]
    inner = el("g", *_edges(picture, frame, names), *parts, transform=f"translate({_LEFT},{_TOP})")
    box = (width + _LEFT + _RIGHT, height + _TOP + _BOTTOM)
    return el(
        "svg",
        inner,
        class_="map",
        viewBox=f"0 0 {px(box[0])} {px(box[1])}",
        width=px(box[0]),
        height=px(box[1]),
        role="group",
        tabindex=0,
        aria_label=f"{len(picture.parts)} parts; the arrow keys go from one to the next",
    )


def thumbnail(picture: Picture, plane: Plane | None) -> Markup:
    """The same in little, without words."""
    wide, tall = 52, 34
    found: list[Markup] = []
    if plane is not None:
        frame = frame_of(plane, wide, tall if plane.down is not None else 10, 10, 14)
        width, height = frame.size
        for i, part in enumerate(picture.parts):
            for rect in plane.rects(part.boxes):
                left, top, w, h = frame.place(rect)
                x, y = px(left + (wide - width) / 2), px(top + (tall - height) / 2)
                found.append(el("rect", x=x, y=y, width=px(w), height=px(h), class_=_fill(picture, i)))
    box = f"0 0 {px(wide)} {px(tall)}"
    return el("svg", *found, class_="mini", viewBox=box, width=px(wide), height=px(tall), aria_hidden="true")


def _fill(picture: Picture, index: int) -> str:
    return fill(picture.key(index)) if picture.axes else "whole"


def _part(picture: Picture, index: int, part: Part, frame: Frame, label: str) -> Markup:
    rects = [frame.place(rect) for rect in frame.plane.rects(part.boxes)]
    drawn = [el("rect", x=px(x), y=px(y), width=px(max(w, 0.5)), height=px(max(h, 0.5))) for x, y, w, h in rects]
    word = picture.label(part) if picture.axes else "whole"
    for x, y, w, h in sorted(rects, key=lambda r: -r[2] * r[3])[:_WORDS]:
        if w >= 6.6 * len(word) + 6 and h >= 13:
            drawn.append(el("text", word, x=px(x + w / 2), y=px(y + h / 2), class_="word"))
    return el("g", *drawn, class_=f"part {_fill(picture, index)}", data_p=index, role="img", aria_label=label)


def _edges(picture: Picture, frame: Frame, names: Sequence[str] | None) -> Iterator[Markup]:
    """The dims along the edges, with the places where they are cut."""
    plane = frame.plane
    rects = [rect for part in picture.parts for rect in plane.rects(part.boxes)]
    if plane.across is not None:
        size = plane.width
        name = "elements, row by row" if plane.across == -1 else _dim(plane.across, names)
        yield el("text", f"{name} ", el("tspan", str(size), class_="count"), x=0, y=-26, class_="dim")
        for at, word in _ticks({rect.left for rect in rects} | {rect.right for rect in rects}, size):
            x = at / max(size, 1) * frame.width
            yield el("path", d=f"M{px(x)},-4 v-4", class_="tick")
            yield el("text", word, x=px(x), y=-11, class_="at", text_anchor=_anchor(at, size)) if word else Markup("")
    if plane.down is not None:
        size = plane.height
        name = f"{_dim(plane.down, names)} "
        yield el(
            "text",
            name,
            el("tspan", str(size), class_="count"),
            class_="dim",
            transform="translate(-60,0) rotate(-90)",
            text_anchor="end",
        )
        for at, word in _ticks({rect.top for rect in rects} | {rect.bottom for rect in rects}, size):
            y = at / max(size, 1) * frame.height
            yield el("path", d=f"M-4,{px(y)} h-4", class_="tick")
            drop = 8 if at == 0 else 0 if at == size else 4
            yield el("text", word, x=-11, y=px(y + drop), class_="at", text_anchor="end") if word else Markup("")


def _ticks(cuts: Iterable[int], size: int) -> list[tuple[int, str]]:
    """Where a dim is cut, and the numbers that stand there: all while they are few, else those of the ends."""
    marks = sorted({0, size, *cuts})
    if len(marks) <= _TICKS:
        return [(at, f"{at}") for at in marks]
    kept = marks if len(marks) <= 65 else [0, size]
    return [(at, f"{at}" if at in (0, size) else "") for at in kept]


def _anchor(at: int, size: int) -> str:
    return "start" if at == 0 else "end" if at == size else "middle"


def _dim(dim: int, names: Sequence[str] | None) -> str:
    return f"dim {dim}" if names is None else names[dim]


def redrawn(picture: Picture, plane: Plane | None) -> Plane | None:
    """The plane of a coarser picture of the same layout."""
    if plane is None:
        return None
    return plane_of(picture.layout.shape, [box for part in picture.parts for box in part.boxes])
