"""The colours of parts: eight hues that differ in lightness, too, then the same with a pattern over them."""

from __future__ import annotations

from shardtensor.cli.page.markup import Markup, el, join

HUES = 8
PATTERNS = ("", "M-1,5 l6,-6 M0,8 l8,-8 M3,9 l6,-6", "M0,4 h8", "M4,0 v8")


def fill(key: int) -> str:
    """The class of a part's colour."""
    return f"k{key % (HUES * len(PATTERNS))}"


def definitions() -> Markup:
    """The patterns, once for the page."""
    found = []
    for key in range(HUES, HUES * len(PATTERNS)):
        lines = el("path", d=PATTERNS[key // HUES], class_="hatch")
        ground = el("rect", width=8, height=8, class_=f"k{key % HUES}")
        found.append(el("pattern", ground, lines, id=f"k{key}", width=8, height=8, patternUnits="userSpaceOnUse"))
    arrow = el("path", d="M0,0 L7,3.5 L0,7 z", class_="head")
    found.append(
        el(
            "marker",
            arrow,
            id="head",
            viewBox="0 0 7 7",
            refX=6,
            refY=3.5,
            markerWidth=6,
            markerHeight=6,
            orient="auto",
        )
    )
    return el("svg", el("defs", *found), width=0, height=0, class_="defs", aria_hidden="true")


def rules() -> str:
    """The style of the classes."""
    plain = [f".k{key}{{fill:var(--c{key})}}" for key in range(HUES)]
    return join(*map(Markup, plain + [f".k{k}{{fill:url(#k{k})}}" for k in range(HUES, HUES * len(PATTERNS))]))
