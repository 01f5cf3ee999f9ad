"""One SVG for a text or a slide: the layouts of a plan on a sheet, or one spec and the steps of its reshard."""

from __future__ import annotations

import re

from shardtensor.cli.mesh_rows import mesh_text
from shardtensor.cli.page import colours
from shardtensor.cli.page.drawing import drawing, thumbnail
from shardtensor.cli.page.figures import part_label
from shardtensor.cli.page.markup import Markup, el, px
from shardtensor.cli.page.page import packaged, short
from shardtensor.cli.page.reshards import step_drawing
from shardtensor.cli.page.tree import segments
from shardtensor.cli.scene import Scene, Shown, shape_text
from shardtensor.layout.explain import say_bytes, say_step

_EDGE = 28
_WIDE, _TALL = 336, 112
_MINI = (104.0, 76.0)
_COLUMNS = 3
_LETTERS = 34
_STYLE = (
    'svg{font:14px system-ui,"Segoe UI","Helvetica Neue",sans-serif;fill:var(--ink)}.code{font-family:var(--mono);'
    "font-size:12.5px}.title{font-size:19px;font-weight:650}.soft{fill:var(--soft);font-size:12.5px}"
    ".bold{font-weight:600}.ground{fill:var(--ground)}"
)


def picture(scene: Scene) -> str:
    """The SVG of a scene, in light and in dark as whoever shows it prefers.

    Example:
        >>> from shardtensor.cli.scene import scene_of_spec
        >>> from shardtensor.mesh import read_mesh
        >>> text = picture(scene_of_spec("[tp, -]", (8, 6), read_mesh("tp=4")))
        >>> text[:4], "<script" in text
        ('<svg', False)
    """
    if scene.resolved is not None:
        return _sheet(scene)
    return _one(scene)


def _sheet(scene: Scene) -> str:
    """Every distinct layout in little, with the tensors that it stands for."""
    count = sum(shown.tensor.numel * len(shown.names) for shown in scene.shown)
    tensors = sum(len(shown.names) for shown in scene.shown)
    facts = f"{tensors:,} tensors, {short(count)} elements, on {scene.axes.mesh.size:,} ranks: {mesh_text(scene.axes)}"
    found = [_text(scene.title, 0, 18, "title"), _text(facts, 0, 40, "soft")]
    for i, shown in enumerate(scene.shown):
        row, column = divmod(i, _COLUMNS)
        cell = el("g", *_cell(shown), transform=f"translate({column * _WIDE},{66 + row * _TALL})")
        found.append(cell)
    rows = -(-len(scene.shown) // _COLUMNS)
    return _svg(found, min(len(scene.shown), _COLUMNS) * _WIDE, 66 + rows * _TALL - 20)


def _cell(shown: Shown) -> list[Markup]:
    x = _MINI[0] + 14
    lines = [_text(str(shown.spec), x, 12, "code bold")]
    below = [f"{name} × {len(names)}" if len(names) > 1 else name for name, names in shown.folded.items()]
    for i, name in enumerate(below[:3]):
        lines.append(_text(_brief(name), x, 31 + 16 * i, "soft"))
    size = f"{shape_text(shown.tensor.shape)}, {say_bytes(shown.most * shown.item)} a rank"
    return [thumbnail(shown.picture, shown.plane, *_MINI), *lines, _text(size, x, 31 + 16 * len(below[:3]), "soft")]


def _brief(name: str) -> str:
    """The last words of a folded name, as many as there is room for."""
    words = segments(name)
    if len(name) > _LETTERS:
        words = [word if len(word) <= _LETTERS // 2 else re.sub(r",[^{}]*}", ",…}", word) for word in words]
    while len(words) > 1 and (len(".".join(words)) > _LETTERS or words[0].startswith("{0..")):
        words = words[1:]
    return ".".join(words)


def _one(scene: Scene) -> str:
    """One spec, and below it the steps on the way to others."""
    shown = scene.shown[0]
    facts = f"{scene.subject} {shown.tensor.dtype} on {scene.axes.mesh.size:,} ranks: {mesh_text(scene.axes)}"
    found = [_text(scene.title, 0, 18, "title"), _text(facts, 0, 40, "soft")]
    top, wide = 58.0, 400.0
    if not scene.reshards and shown.plane is not None:
        labels = [part_label(shown, part) for part in shown.picture.parts]
        found.append(_placed(drawing(shown.picture, shown.plane, shown.tensor.dims, labels), 0, top))
        width, height = _size(found[-1])
        top, wide = top + height, max(wide, width)
    for reshard in scene.reshards:
        found[0] = _text(" → ".join(reshard.texts), 0, 18, "title")
        for step in (step for steps in reshard.routes for step in steps):
            kind, _, rest = say_step(step, reshard.item).partition(" ")
            found += [
                _text(kind, 0, top + 14, "code bold"),
                _text(rest.strip().replace("   ", ", "), 8.2 * len(kind) + 14, top + 14, "soft"),
            ]
            drawn = step_drawing(step)
            if drawn is not None:
                found.append(_placed(drawn, 0, top + 28))
                width, height = _size(found[-1])
                top, wide = top + height, max(wide, width)
            top += 48
    return _svg(found, wide, top)


def _text(text: str, x: float, y: float, kind: str) -> Markup:
    return el("text", text, x=px(x), y=px(y), class_=kind)


def _placed(drawn: Markup, x: float, y: float) -> Markup:
    """A drawing inside another."""
    return Markup(drawn.replace("<svg ", f'<svg x="{px(x)}" y="{px(y)}" ', 1))


def _size(drawn: Markup) -> tuple[float, float]:
    """The width and height of a drawing."""
    box = drawn.partition('viewBox="')[2].partition('"')[0].split()
    return float(box[2]), float(box[3])


def _svg(found: list[Markup], width: float, height: float) -> str:
    style = Markup(packaged("drawing.css") + colours.rules() + _STYLE)
    box = f"{-_EDGE} {-_EDGE} {px(width + 2 * _EDGE)} {px(height + 2 * _EDGE)}"
    ground = el("rect", x=-_EDGE, y=-_EDGE, width="100%", height="100%", class_="ground")
    return (
        el(
            "svg",
            el("style", style),
            colours.definitions(),
            ground,
            *found,
            xmlns=_SVG,
            viewBox=box,
            width=px(width + 2 * _EDGE),
            height=px(height + 2 * _EDGE),
        )
        + "\n"
    )


_SVG = "http://www.w3.org/2000/svg"
"""The name that tells readers of XML what this is; nothing is fetched from it."""
