"""The modules of a model with their tensors, layers folded: each row leads to the figure of its layout."""

from __future__ import annotations

import re

import attrs

from shardtensor.cli.page.figures import broken, redrawn, thumbnail
from shardtensor.cli.page.markup import Markup, el
from shardtensor.cli.picture import picture_of
from shardtensor.cli.scene import Scene, Shown, size_text
from shardtensor.layout.explain import say_bytes
from shardtensor.plan.resolved import Passing, Resolved

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
