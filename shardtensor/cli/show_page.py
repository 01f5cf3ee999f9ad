"""The page of a scene, one HTML text that needs nothing else: its tensors, a drawing of each layout, the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

from shardtensor.cli.picture import Part, Plane
from shardtensor.cli.scene import Scene, Shown, mesh_rows, size_text
from shardtensor.layout.explain import say_bytes
from shardtensor.plan.findings.brief import brief_names
from shardtensor.plan.findings.report import folded
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.outlook.memory import plan_bytes
from shardtensor.plan.resolved import Passing, Resolved

WIDE, TALL = 560, 330
FLAT, THIN = 90, 110
"""The least height and width of a drawing; the aspect of longer tensors is not kept."""

_LINE = 64
_LEFT, _TOP, _RIGHT, _BOTTOM = 72, 40, 12, 14
_TICKS = 9
_WORDS = 4  # of one part, where it has several boxes
_BOXES = 6  # of a part that are listed; the drawing shows all
_HUES = 8
_HATCHES = ("", "M-1,5 l6,-6 M0,8 l8,-8 M3,9 l6,-6", "M0,4 h8", "M4,0 v8")
"""The colours of parts: eight hues that differ in lightness, too, then the same with a pattern over them."""


class Markup(str):
    """Text that is markup already; all other text is escaped wherever it is put."""

    __slots__ = ()


def el(name: str, /, *children: str | None, **attributes: object) -> Markup:
    """An element. Attributes that are None are left out; ``class_`` is class, ``aria_label`` is aria-label.

    Example:
        >>> print(el("p", "1 < 2", el("b", "yes"), class_="note", id=None))
        <p class="note">1 &lt; 2<b>yes</b></p>
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items() if value is not None
    )  # fmt: skip
    text = "".join(child if isinstance(child, Markup) else escape(child) for child in children if child)
    return Markup(f"<{name}{said}>" if name == "meta" else f"<{name}{said}>{text}</{name}>")


def page(scene: Scene) -> str:
    """The whole page as HTML.

    Example:
        >>> from shardtensor.cli.scene import scene_of_plan
        >>> from shardtensor.plan.loading import load_plan
        >>> from shardtensor.plan.match.resolve import resolve
        >>> from shardtensor.plan.models.dims import model_from_dims
        >>> plan = load_plan("mlp", world=4)
        >>> text = page(scene_of_plan(resolve(plan, model_from_dims(plan)), "mlp"))
        >>> text.startswith("<!doctype html>"), "http" in text
        (True, False)
    """
    resolved = scene.resolved
    style = (files("shardtensor.cli") / "show_page.css").read_text(encoding="utf-8")
    fills = [f".k{k}{{fill:var(--c{k})}}" if k < _HUES else f".k{k}{{fill:url(#k{k})}}" for k in range(_kinds())]
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{scene.title} · shardtensor"),
        el("style", Markup(style + "".join(fills))),
    )
    body = [_hatches(), el("header", el("h1", scene.title), el("p", scene.subject), *_facts(scene))]
    body += [_findings(resolved), _tensors(scene)]
    body.append(_section("layouts", "Layouts", *(_figure(each, i) for i, each in enumerate(scene.shown))))
    body.append(_section("ranks", "Ranks", el("p", scene.mesh_text), _mesh(scene)))
    body.append(_flows(resolved))
    body.append(el("footer", "Drawn by shardtensor show, from the text alone: nothing ran."))
    return "<!doctype html>\n" + el("html", head, el("body", *body), lang="en") + "\n"


def _section(identifier: str, title: str, *children: str) -> Markup:
    return el("section", el("h2", title), *children, id=identifier)


def _facts(scene: Scene) -> Iterator[Markup]:
    yield el("p", scene.mesh_text)
    resolved = scene.resolved
    own = own_tensors(resolved)
    count = sum(placed.tensor.numel for placed in own if not placed.tensor.is_buffer)
    text = f"{count:,} parameters, {len(own):,} tensors"
    if not resolved.errors:
        text += f", {say_bytes(plan_bytes(resolved).most.total)} a rank (parameters, gradients, adamw, gathered units)"
    yield el("p", text)


def _tensors(scene: Scene) -> Markup:
    """A row for each pattern of names, in the order of the model, with its layout and what it takes on a rank."""
    order = {name: i for i, name in enumerate(scene.resolved.tensors)}
    found = [(names, pattern, i) for i, each in enumerate(scene.shown) for pattern, names in each.folded.items()]
    most = max((scene.shown[i].rank_bytes(len(names)) for names, _, i in found), default=0)
    rows = []
    for names, pattern, i in sorted(found, key=lambda row: min(order.get(name, 0) for name in row[0])):
        shown, size = scene.shown[i], scene.shown[i].rank_bytes(len(names))
        bar = el("i", style=f"width:{max(100 * size / most, 0.5) if most else 0:.1f}%")
        place, text = shown.lines.get(pattern, ("", ""))
        rows.append(el(
            "tr",
            el("td", el("a", el("code", pattern), href=f"#f{i}"), f" × {len(names)}" if len(names) > 1 else ""),
            el("td", el("code", str(shown.spec)), f" stored {shown.stored}" if shown.stored else ""),
            el("td", size_text(shown.tensor.shape)),
            el("td", el("span", bar, class_="bar"), say_bytes(size)),
            el("td", f"is {shown.tied[pattern]}" if pattern in shown.tied else place, " ", el("code", text)),
        ))  # fmt: skip
    titles = (el("th", title) for title in ("tensor", "layout", "shape", "bytes a rank", "rule"))
    return _section("tensors", "Tensors", el("table", el("tr", *titles), *rows))


def _figure(shown: Shown, number: int) -> Markup:
    """The drawing of a layout, with what one rank holds."""
    notes = [shown.size, shown.held()]
    if shown.picture.merged > 1:
        notes.append(f"one part stands for up to {shown.picture.merged:,} neighbours")
    if shown.plane is None:
        body = el("p", "Its boxes are too fine to be drawn.")
    else:
        body, is_to_scale = _drawing(shown, shown.plane)
        notes += [] if is_to_scale else ["sides not to one scale"]
    stored = f" stored {shown.stored}" if shown.stored else ""
    title = el("h3", el("code", str(shown.spec)), stored)
    return el("figure", title, body, el("p", "; ".join(notes), class_="note"), id=f"f{number}")


def _drawing(shown: Shown, plane: Plane) -> tuple[Markup, bool]:
    """The drawing of a layout to scale, and whether both sides have one scale; each part can be pointed at."""
    width, height = _sides(plane)
    across, down = width / max(plane.width, 1), height / max(plane.height, 1)
    parts, tops, lefts = [], {0, plane.height}, {0, plane.width}
    for i, part in enumerate(shown.picture.parts):
        places, rects = [], plane.rects(part.boxes)
        for rect in rects:
            (top, left), (bottom, right) = rect.offsets, rect.ends
            tops |= {top, bottom}
            lefts |= {left, right}
            places.append((left * across, top * down, (right - left) * across, (bottom - top) * down))
        drawn = [el("title", _part_text(shown, part))]
        drawn += [
            el("rect", x=_px(x), y=_px(y), width=_px(max(w, 0.5)), height=_px(max(h, 0.5))) for x, y, w, h in places
        ]
        word = str(shown.picture.number(i)) if shown.picture.axes else "whole"
        for x, y, w, h in sorted(places, key=lambda place: -place[2] * place[3])[:_WORDS]:
            if w >= 6.6 * len(word) + 6 and h >= 13:
                drawn.append(el("text", word, x=_px(x + w / 2), y=_px(y + h / 2), class_="word"))
        kind = f"k{shown.picture.number(i) % _kinds()}" if shown.picture.axes else "whole"
        if part.most or len(shown.picture.parts) == 1:
            parts.append(el("g", *drawn, class_=f"part {kind}"))
    edges = []
    names = shown.tensor.dims or [f"dim {i}" for i in range(len(plane.shape))]
    edges.append(el("text", _dims(plane.shape[plane.split :], names[plane.split :]), x=0, y=-26))
    for at, text in _ticks(lefts, plane.width):
        anchor = "start" if at == 0 else "end" if at == plane.width else "middle"
        edges.append(el("path", d=f"M{_px(at * across)},-4 v-4", class_="tick"))
        edges.append(el("text", text, x=_px(at * across), y=-11, text_anchor=anchor))
    if plane.split:
        turned = "translate(-60,0) rotate(-90)"
        edges.append(el("text", _dims(plane.shape[: plane.split], names), transform=turned, text_anchor="end"))
        for at, text in _ticks(tops, plane.height):
            drop = 8 if at == 0 else 0 if at == plane.height else 4
            edges.append(el("path", d=f"M-4,{_px(at * down)} h-4", class_="tick"))
            edges.append(el("text", text, x=-11, y=_px(at * down + drop), text_anchor="end"))
    size = _px(width + _LEFT + _RIGHT), _px(height + _TOP + _BOTTOM)
    inner = el("g", *edges, *parts, transform=f"translate({_LEFT},{_TOP})")
    svg = el("svg", inner, class_="map", viewBox=f"0 0 {size[0]} {size[1]}", width=size[0], height=size[1], role="img")
    return svg, not plane.split or abs(across - down) <= 1e-6 * across


def _sides(plane: Plane) -> tuple[float, float]:
    """The width and the height of a drawing."""
    if not plane.split:
        return WIDE, _LINE
    ratio = plane.height / max(plane.width, 1)
    width, height = (WIDE, WIDE * ratio) if WIDE * ratio <= TALL else (TALL / ratio, TALL)
    return max(width, THIN), max(height, FLAT)


def _part_text(shown: Shown, part: Part) -> str:
    """All that is to be said of a part."""
    picture = shown.picture
    ranks, count = picture.ranks(part, 6)
    at = "everywhere" if not picture.axes else "" if picture.names[0].startswith("place") else picture.place_text(part)
    listed = f"rank{'s' * (count > 1)} {', '.join(map(str, ranks))}" + (f", … {count:,} in all" * (count > len(ranks)))
    boxes = ", ".join(map(str, part.boxes[:_BOXES])) + ", …" * (len(part.boxes) > _BOXES)
    sizes = " to ".join(say_bytes(n * shown.item) for n in sorted({part.least, part.most}))
    return "; ".join(filter(None, (at, listed, boxes, sizes)))


def _ticks(cuts: Iterable[int], size: int) -> list[tuple[int, str]]:
    """Where a side is cut, and the numbers that stand there: all while they are few, else those of the ends."""
    marks = sorted(cuts)
    return [(at, str(at) if len(marks) <= _TICKS or at in (0, size) else "") for at in marks[:: -(-len(marks) // 65)]]


def _dims(shape: Sequence[int], names: Sequence[str]) -> str:
    return " × ".join(f"{name} {size}" for name, size in zip(names, shape, strict=False))


def _px(value: float) -> str:
    """A length in as few characters as a tenth of a pixel needs."""
    return f"{value:.1f}".removesuffix(".0")


def _kinds() -> int:
    return _HUES * len(_HATCHES)


def _hatches() -> Markup:
    """The patterns, once for the page."""
    found = []
    for key in range(_HUES, _kinds()):
        lines = el("path", d=_HATCHES[key // _HUES], class_="hatch")
        ground = el("rect", width=8, height=8, class_=f"k{key % _HUES}")
        found.append(el("pattern", ground, lines, id=f"k{key}", width=8, height=8, patternUnits="userSpaceOnUse"))
    return el("svg", el("defs", *found), width=0, height=0, class_="defs", aria_hidden="true")


def _mesh(scene: Scene) -> Markup:
    """The ranks of the mesh, long axes with their middle left out."""
    found = mesh_rows(scene.axes)
    top = el("tr", el("th"), *(el("th", word) for word in found.columns))
    lines = [
        el("tr", el("th", label), *(el("td", "…" if rank is None else str(rank)) for rank in ranks))
        for label, ranks in found.rows
    ]
    return el("table", top, *lines, class_="mesh")


def _flows(resolved: Resolved) -> Markup:
    """How values pass modules: a row for each text, with the modules that have it."""
    alike: dict[str, list[str]] = {}
    for path, passing in resolved.modules.items():
        if text := flow_text(passing):
            alike.setdefault(text, []).append(path)
    rows = [
        el(
            "tr",
            el("td", *(el("code", name or "the module") for name in brief_names(paths))),
            el("td", el("code", text)),
        )
        for text, paths in alike.items()
    ]
    return _section("flows", "Values", el("table", *rows)) if rows else Markup()


def flow_text(passing: Passing) -> str:
    """How values pass a module, in one line."""
    words = [f"in{' ' * bool(name)}{name} {flow}" for name, (flow, _) in passing.ins.items()]
    words += [f"out{' ' * bool(name)}{name} {flow}" for name, (flow, _) in passing.outs.items()]
    return "  ·  ".join([*words, *(f"use {hook.name}" for hook, _ in passing.uses)])


def _findings(resolved: Resolved) -> Markup:
    """What a check found."""
    found = (el("pre", str(finding), class_=finding.severity) for finding in folded(resolved.findings))
    return _section("findings", "Findings", *found) if resolved.findings else Markup()
