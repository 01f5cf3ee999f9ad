"""One figure for each distinct layout: what is said of it, its drawing, and the numbers that its parts show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardtensor.cli.mesh_rows import MeshRows
from shardtensor.cli.page.colours import HUES, PATTERNS
from shardtensor.cli.page.drawing import drawing, frame_of
from shardtensor.cli.page.markup import Markup, el, join
from shardtensor.cli.picture import Part, Picture
from shardtensor.cli.scene import Shown, device_of, size_text
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
