"""The page of a scene: one text that needs nothing else."""

from __future__ import annotations

from importlib.resources import files

from shardtensor.cli.mesh_rows import MeshRows, mesh_rows, mesh_text
from shardtensor.cli.page import colours, sections
from shardtensor.cli.page.figures import figure, figure_data
from shardtensor.cli.page.markup import Markup, data, el
from shardtensor.cli.page.reshards import reshards
from shardtensor.cli.page.tree import search_box, tree
from shardtensor.cli.scene import Scene
from shardtensor.layout.explain import say_bytes
from shardtensor.plan.axes import Axes
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.outlook.memory import PlanBytes, plan_bytes


def page(scene: Scene) -> str:
    """The whole page as HTML.

    Example:
        >>> from shardtensor.cli.scene import scene_of_spec
        >>> from shardtensor.mesh import read_mesh
        >>> text = page(scene_of_spec("[tp, -]", (8, 6), read_mesh("tp=4")))
        >>> text.startswith("<!doctype html>"), "http" in text
        (True, False)
    """
    is_plan = scene.resolved is not None
    held = None if scene.resolved is None or scene.resolved.errors else plan_bytes(scene.resolved)
    rows = mesh_rows(scene.axes)
    style = Markup(_packaged("drawing.css") + _packaged("page.css") + colours.rules())
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{scene.title} · shardtensor"),
        el("style", style),
    )
    figures = [figure(shown, i, is_plan) for i, shown in enumerate(scene.shown)]
    stage = el(
        "div",
        el("div", *figures, class_="figures"),
        _detail(),
        _mesh_drawing(scene.axes, rows),
        class_="stage",
        id="stage",
    )
    left = el("nav", search_box(), tree(scene), aria_label="tensors") if is_plan else ""
    start = next((i for i, shown in enumerate(scene.shown) if shown.picture.axes), 0)
    kind = "spread" if is_plan else "single"
    parts: list[Markup | str] = [_header(scene, held), el("main", left, stage, class_=kind, data_start=start)]
    resolved = scene.resolved
    if resolved is not None and resolved.errors:
        parts.append(sections.findings(resolved))
    parts.append(reshards(scene.reshards))
    if resolved is not None and held is not None:
        parts += [sections.memory(resolved, held), sections.units(resolved)]
        parts.append(sections.findings(resolved))
    parts.append(el("footer", "Drawn by shardtensor show, from the text alone: nothing ran."))
    known = data("data", [figure_data(shown, rows) for shown in scene.shown])
    body = el("body", colours.definitions(), *parts, known, el("script", Markup(_packaged("page.js"))))
    return "<!doctype html>\n" + el("html", head, body, lang="en") + "\n"


def _header(scene: Scene, held: PlanBytes | None) -> Markup:
    world = scene.axes.mesh.size
    facts = [(f"{world:,}", f"rank{'s' * (world != 1)}", "" if scene.axes.mesh.is_unnamed else mesh_text(scene.axes))]
    if scene.resolved is not None:
        own = own_tensors(scene.resolved)
        count = sum(placed.tensor.numel for placed in own if not placed.tensor.is_buffer)
        facts.append((_short(count), "parameters", f"{count:,}"))
        drawn = sum(len(shown.names) for shown in scene.shown)
        of = "" if drawn == len(scene.resolved.tensors) else f"{drawn:,} of them "
        layouts = len(scene.shown)
        facts.append((f"{len(own):,}", "tensors", f"{of}in {layouts:,} layout{'s' * (layouts != 1)}"))
        if held is not None:
            facts.append((say_bytes(held.most.total), "a rank", "parameters, gradients, adamw, gathered units"))
    cells = [el("div", el("dt", what), el("dd", number, el("small", more))) for number, what, more in facts]
    kind = None if scene.resolved is not None else "spec long" if len(scene.title) > 48 else "spec"
    return el("header", el("h1", scene.title, class_=kind), el("p", scene.subject, class_="subject"), el("dl", *cells))


def _detail() -> Markup:
    hint = el("p", "Point at a piece or a rank; in the drawing, the arrow keys go from piece to piece.", class_="hint")
    return el("section", hint, class_="detail", id="detail", aria_live="polite")


def _short(count: int) -> str:
    """A number as people say it.

    Example:
        >>> _short(8_030_261_248), _short(1536), _short(12)
        ('8.03 B', '1.54 K', '12')
    """
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def _packaged(name: str) -> str:
    """The text of a file that comes with the page."""
    return (files("shardtensor.cli.page") / name).read_text(encoding="utf-8")


def _mesh_drawing(axes: Axes, rows: MeshRows) -> Markup:
    """The ranks of a mesh, long axes with their middle left out."""
    head = [el("th", _numbers(word), scope="col") for word in rows.columns]
    across = el("span", " × ".join(n for n in rows.across if n != "*"), class_="axis")
    lines = []
    index = 0
    for label, ranks in rows.rows:
        cells = []
        for rank in ranks:
            if rank is None:
                cells.append(el("td", "⋯" if any(r is not None for r in ranks) else "⋮", class_="gap"))
            else:
                cells.append(el("td", el("span", str(rank), class_="rank", data_c=index)))
            index += 1
        lines.append(el("tr", el("th", label.replace("*", ""), scope="row"), *cells))
    factors = [
        el("p", el("b", name), " = ", " × ".join(f"{part} {axes.size(part)}" for part in parts), class_="note")
        for name, parts in axes.made_of.items()
    ]
    data = el("p", f"samples differ along {', '.join(axes.data)}", class_="note") if axes.data else ""
    top = el("tr", el("td"), *head) if not axes.mesh.is_unnamed else ""
    return el(
        "section",
        el("h3", "Ranks", el("span", "" if axes.mesh.is_unnamed else mesh_text(axes), class_="count")),
        el("div", el("table", el("caption", across), el("tbody", top, *lines)), class_="scroll"),
        *factors,
        data,
        class_="mesh",
    )


def _numbers(label: str) -> str:
    """The coordinates of a column without the names of the axes, which stand above all."""
    return ",".join(word.rpartition(" ")[2] for word in label.split(", "))
