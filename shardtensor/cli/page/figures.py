"""One figure for each distinct layout: its facts, its drawing to scale, and the numbers of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from shardtensor.cli.mesh_rows import MeshRows
from shardtensor.cli.page.markup import HUES, PATTERNS, Markup, el, fill, join, px
from shardtensor.cli.picture import Part, Picture
from shardtensor.cli.scene import Plane, Rect, Shown, device_of, plane_of, size_text
from shardtensor.layout.explain import say_bytes

MAX_BOXES = 6
"""Of a part, told one by one; the drawing shows all."""


def figure(shown: Shown, number: int, is_plan: bool) -> Markup:
    """The figure of a layout."""
    head = [el("h2", el("code", str(shown.spec)), _stored(shown))] if is_plan else []
    about = [el("span", size_text(shown.tensor.shape, shown.tensor.dims)), el("span", shown.tensor.dtype)]
    if is_plan:
        count = len(shown.names)
        about.append(el("span", f"{count:,} tensor{'s' * (count != 1)}"))
    body: Markup
    if shown.plane is None:
        body = el("p", "Its boxes are too fine to be drawn.", class_="note")
    else:
        body = drawing(
            shown.picture, shown.plane, shown.tensor.dims, [_part_label(shown, p) for p in shown.picture.parts]
        )
    notes = [el("li", note) for note in _notes(shown)]
    return el(
        "figure",
        *head,
        el("p", *about, class_="facts"),
        _names(shown) if is_plan else "",
        body,
        el("ul", *notes, class_="notes"),
        id=f"f{number}",
        class_="figure",
        data_f=number,
    )


def figure_data(shown: Shown, rows: MeshRows) -> dict[str, Any]:
    """What the script knows of a figure: of each part where, ranks, device, boxes, bytes; of each rank its part."""
    picture, device = shown.picture, device_of(shown.spec)
    parts = []
    for part in picture.parts:
        parts.append(
            {
                "at": _where_text(picture, part),
                "ranks": _ranks_text(picture, part),
                "device": device(part.rank),
                "boxes": [[list(box.offsets), list(box.sizes)] for box in part.boxes[:MAX_BOXES]],
                "count": len(part.boxes),
                "numel": _span_text(part.least, part.most),
                "bytes": _bytes_text(part, shown.item),
            }
        )
    cells = [None if rank is None else picture.part_of(rank) for _, ranks in rows.rows for rank in ranks]
    return {
        "dims": list(shown.tensor.dims) if shown.tensor.dims else [f"dim {i}" for i in range(len(shown.tensor.shape))],
        "parts": parts,
        "cells": cells,
        "fills": [picture.key(i) % (HUES * len(PATTERNS)) for i in range(len(parts))] if picture.axes else [-1],
    }


def _where_text(picture: Picture, part: Part) -> str:
    """Where the ranks of a part stand in the mesh; empty where only their numbers say it."""
    if not picture.axes:
        return "everywhere"
    return "" if picture.names[0].startswith("place") else picture.place_text(part)


def _ranks_text(picture: Picture, part: Part) -> str:
    """The ranks that hold a part, the first ones where there are many."""
    ranks, count = picture.ranks(part, 6)
    listed = ", ".join(f"{rank:,}" for rank in ranks)
    if count <= len(ranks):
        return f"{'ranks' if count > 1 else 'rank'} {listed}"
    return f"{count:,} ranks: {listed}, …"


def _span_text(least: int, most: int) -> str:
    """A number, or the least and the most.

    Example:
        >>> _span_text(3, 3), _span_text(1000, 2000)
        ('3', '1,000 to 2,000')
    """
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _bytes_text(part: Part, item: int) -> str:
    """The bytes of one rank at a part."""
    text = say_bytes(part.most * item)
    text = text if part.least == part.most else f"{say_bytes(part.least * item)} to {text}"
    return text if part.places == 1 else f"{text} each"


def _part_label(shown: Shown, part: Part) -> str:
    """All that is to be said of a part, for those who do not see it."""
    boxes = ", ".join(map(str, part.boxes[:MAX_BOXES])) + (", …" if len(part.boxes) > MAX_BOXES else "")
    at, device = _where_text(shown.picture, part), device_of(shown.spec)(part.rank)
    return "; ".join(filter(None, (at, _ranks_text(shown.picture, part), device, boxes, _bytes_text(part, shown.item))))


def _stored(shown: Shown) -> Markup | str:
    if not shown.stored:
        return ""
    return join(" ", el("span", "stored ", el("code", shown.stored), class_="stored"))


def _names(shown: Shown) -> Markup:
    rows = []
    for pattern, names in shown.folded.items():
        place, text = shown.lines.get(pattern, ("", ""))
        rows.append(
            el(
                "li",
                el("code", broken(pattern)),
                el("span", f" × {len(names)}", class_="dim") if len(names) > 1 else "",
                el("span", f" is {shown.tied[pattern]}", class_="dim") if pattern in shown.tied else "",
                el("span", place, " ", el("code", text), class_="origin") if place else "",
            )
        )
    return el("ul", *rows, class_="names")


def broken(name: str) -> Markup:
    """A dotted name that may break after its dots."""
    return join(*(join(word, Markup("<wbr>")) for word in _after_dots(name)))


def _after_dots(name: str) -> Sequence[str]:
    words = name.split(".")
    return [f"{word}." for word in words[:-1]] + words[-1:]


def _notes(shown: Shown) -> list[str]:
    picture, layout = shown.picture, shown.layout
    notes = []
    if not picture.axes:
        count = len(layout.ranks)
        notes.append(f"whole on each of {count:,} ranks" if count > 1 else f"whole on rank {layout.ranks[0]}")
        notes.append(f"{say_bytes(shown.most * shown.item)} on each")
    else:
        least = min(part.least for part in picture.parts)
        local = " × ".join(map(str, layout.local_shape(picture.parts[0].rank)))
        sizes = [say_bytes(n * shown.item) for n in sorted({least, shown.most})]
        each = "" if least != shown.most else f"{local}, "
        notes.append(f"a rank holds {each}{' to '.join(sizes)}")
        others = picture.told([axis for axis in range(len(layout.grid)) if axis not in picture.axes])
        if picture.copies > 1:
            along = f", along {', '.join(name for name, _ in others)}" if others else ""
            notes.append(f"{picture.copies:,} copies{along}")
        if picture.merged > 1:
            notes.append(f"one stretch stands for up to {picture.merged:,} neighbours")
    if shown.stored:
        notes.append(f"{say_bytes(shown.rank_bytes(1))} of one while nobody computes with it")
    if layout.partial:
        along = ", ".join(f"{picture.names[axis]} ({op})" for axis, op in layout.partial)
        notes.append(f"not yet joined: each rank holds an addend along {along}")
    if shown.plane is not None and len(shown.tensor.shape) > 1 and not frame_of(shown.plane).is_to_scale:
        notes.append("sides not to one scale")
    if shown.plane is not None and shown.plane.across != -1:
        hidden = [d for d in range(len(shown.tensor.shape)) if d not in (shown.plane.down, shown.plane.across)]
        hidden = [d for d in hidden if d not in shown.plane.apart]
        if hidden:
            names = shown.tensor.dims
            notes.append(f"not drawn, whole: {', '.join(names[d] if names else f'dim {d}' for d in hidden)}")
    return notes


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
