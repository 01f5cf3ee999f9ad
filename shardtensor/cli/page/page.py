"""The page of a scene, one text that needs nothing else: its figures, the tree of its modules, its ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

import attrs

from shardtensor.cli.mesh_rows import MeshRows, mesh_rows, mesh_text
from shardtensor.cli.page.figures import broken, figure, figure_data, redrawn, thumbnail
from shardtensor.cli.page.markup import Markup, data, definitions, el, rules
from shardtensor.cli.picture import picture_of
from shardtensor.cli.scene import Reshard, Scene, Shown, size_text
from shardtensor.layout.explain import say_bytes, say_step
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.folding import folded
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.outlook.memory import PlanBytes, plan_bytes
from shardtensor.plan.resolved import Passing, Resolved


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
    style = Markup(_packaged("page.css") + rules())
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
        parts.append(_findings(resolved))
    parts.append(_reshards(scene.reshards))
    if resolved is not None and not resolved.errors:
        parts.append(_findings(resolved))
    parts.append(el("footer", "Drawn by shardtensor show, from the text alone: nothing ran."))
    known = data("data", [figure_data(shown, rows) for shown in scene.shown])
    body = el("body", definitions(), *parts, known, el("script", Markup(_packaged("page.js"))))
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


def _reshards(found: Sequence[Reshard]) -> Markup | str:
    """The steps by which tensors reach other layouts."""
    if not found:
        return ""
    body = []
    for each in found:
        steps = [say_step(step, each.item) for steps in each.routes for step in steps]
        title = el("h3", el("code", " -> ".join(each.texts)), " ", el("span", broken(each.name), class_="count"))
        body.append(el("div", title, el("pre", "\n".join(steps) or "nothing moves: both say the same")))
    return _section("reshards", "Resharding", *body)


def _findings(resolved: Resolved) -> Markup | str:
    """What a check found; errors first."""
    if not resolved.findings:
        return ""
    rows = []
    for finding in folded(resolved.findings):
        said = [el("p", el("b", f"{finding.severity} {finding.code}"), " ", finding.fault)]
        if finding.origin is not None:
            said.append(
                el("pre", f"{finding.origin}\n" + "\n".join(finding.origin.source.excerpt(finding.origin.span)))
            )
        more = [("why", finding.why), ("fix", finding.fix), *(("note", note) for note in finding.notes)]
        said += [el("p", f"{key}: {text}", class_="note") for key, text in more if text]
        rows.append(el("li", *said, class_=finding.severity))
    return _section("findings", "Findings", el("ul", *rows, class_="findings"))


def _section(identifier: str, title: str, *children: Markup | str) -> Markup:
    return el("section", el("h2", title), *children, id=identifier)


_SEGMENT = re.compile(r"(?:\{[^{}]*\}|[^.{}])+")
_MINI = 16
"""Parts of a picture in little."""

_OPEN = 4  # of many modules side by side, as experts are


@attrs.define
class Node:
    """A module, or layers alike.

    Attributes:
        rows: tensors of its own: the last word of the pattern, the pattern, which figure.
        ends: the first and the last of the tensors below it.
    """

    children: dict[str, Node] = attrs.field(factory=dict)
    rows: list[tuple[str, str, int]] = attrs.field(factory=list)
    ends: tuple[str, str] | None = None


def tree(scene: Scene) -> Markup:
    """The tree of a plan's tensors."""
    root = Node()
    order = {} if scene.resolved is None else {name: i for i, name in enumerate(scene.resolved.tensors)}
    found = [
        (min(order.get(name, 0) for name in names), pattern, number)
        for number, shown in enumerate(scene.shown)
        for pattern, names in shown.folded.items()
    ]
    for _, pattern, number in sorted(found):
        *above, last = segments(pattern)
        node = root
        for word in above:
            node = node.children.setdefault(word, Node())
            names = scene.shown[number].folded[pattern]
            node.ends = (node.ends[0] if node.ends else names[0], names[-1])
        node.rows.append((last, pattern, number))
    most = max(each.rank_bytes(len(names)) for each in scene.shown for names in each.folded.values())
    minis = [_mini(each) for each in scene.shown]
    return el("div", _node(root, 0, scene, most, minis), class_="tree", id="tree")


def segments(pattern: str) -> list[str]:
    """The words of a folded name.

    Example:
        >>> segments("model.layers.{0..31}.mlp.{gate,up}.weight")
        ['model', 'layers', '{0..31}', 'mlp', '{gate,up}', 'weight']
    """
    return _SEGMENT.findall(pattern) or [pattern]


def _node(node: Node, depth: int, scene: Scene, most: int, minis: list[Markup]) -> Markup:
    items = []
    for last, pattern, number in node.rows:
        items.append(el("li", _row(last, pattern, number, scene.shown[number], most, minis[number])))
    for place, (word, child) in enumerate(node.children.items()):
        name, below, deep = word, child, depth + 1
        flow = _flows(scene.resolved, below, deep)
        while not flow and not below.rows and len(below.children) == 1:
            ((word, below),) = below.children.items()
            name, deep = f"{name}.{word}", deep + 1
            flow = _flows(scene.resolved, below, deep)
        if len(below.rows) == 1 and not below.children:  # a layer of one tensor is one line
            ((last, pattern, number),) = below.rows
            row = _row(f"{name}.{last}", pattern, number, scene.shown[number], most, minis[number], flow)
            items.append(el("li", row))
            continue
        is_open = "" if place < _OPEN or len(node.children) <= 2 * _OPEN else None
        summary = el("summary", el("code", broken(name)), _passing(flow))
        items.append(el("li", el("details", summary, _node(below, deep, scene, most, minis), open=is_open)))
    return el("ul", *items)


def _row(last: str, pattern: str, number: int, shown: Shown, most: int, mini: Markup, flow: str = "") -> Markup:
    names = shown.folded[pattern]
    size = shown.rank_bytes(len(names))
    width = f"{max(100 * size / most, 0.5) if most else 0:.1f}%"
    count = f" × {len(names)}" if len(names) > 1 else ""
    return el(
        "a",
        mini,
        el("span", el("code", broken(last)), el("span", count, class_="count"), class_="name"),
        el("span", el("code", str(shown.spec)), el("span", size_text(shown.tensor.shape)), class_="how"),
        el(
            "span",
            el("span", el("i", style=f"width:{width}"), class_="bar"),
            el("span", say_bytes(size)),
            class_="size",
        ),
        _passing(flow),
        href=f"#f{number}",
        class_="row",
        data_f=number,
        data_name=pattern,
        title=pattern,
    )


def _mini(shown: Shown) -> Markup:
    picture = shown.picture
    if len(picture.parts) <= _MINI:
        return thumbnail(picture, shown.plane)
    coarse = picture_of(picture.layout, _MINI, picture.names, picture.made_of)
    return thumbnail(coarse, redrawn(coarse, shown.plane))


def _passing(text: str) -> Markup | str:
    return el("span", text, class_="flow") if text else ""


def _flows(resolved: Resolved | None, node: Node, depth: int) -> str:
    """How values pass the modules of a node; where the first and the last differ, of which one it is said."""
    if resolved is None or not depth or not node.ends:
        return ""
    paths = [".".join(name.split(".")[:depth]) for name in node.ends]
    first, last = (flow_text(resolved.modules[path]) if path in resolved.modules else "" for path in paths)
    if first == last:
        return first
    said = [(path, text) for path, text in zip(paths, (first, last), strict=True) if text]
    return "  ·  ".join(f"{path.rpartition('.')[2]}: {text}" for path, text in said)


def flow_text(passing: Passing) -> str:
    """How values pass a module, in one line."""
    words = [f"in{' ' * bool(name)}{name} {flow}" for name, (flow, _) in passing.ins.items()]
    words += [f"out{' ' * bool(name)}{name} {flow}" for name, (flow, _) in passing.outs.items()]
    words += [f"use {hook.name}" for hook, _ in passing.uses]
    return "  ·  ".join(words)


def search_box() -> Markup:
    """The field that filters the tree; of no use without the script, which shows it."""
    field = el(
        "input", type="search", id="search", placeholder="layers.3.mlp, *norm", autocomplete="off", spellcheck="false"
    )
    return el("label", el("span", "Find"), field, el("span", id="found", role="status"), class_="search", hidden="")
