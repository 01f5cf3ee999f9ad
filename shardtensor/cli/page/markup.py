"""Markup that is escaped by construction: text that is not `Markup` is escaped wherever it is put; and its colours."""

from __future__ import annotations

import json
from html import escape
from typing import Any

HUES = 8
PATTERNS = ("", "M-1,5 l6,-6 M0,8 l8,-8 M3,9 l6,-6", "M0,4 h8", "M4,0 v8")
"""The colours of parts: eight hues that differ in lightness, too, then the same with a pattern over them."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def el(name: str, /, *children: str | None, **attributes: object) -> Markup:
    """An element. Attributes that are None or False are left out; ``class_`` is class, ``aria_label`` is aria-label.

    Example:
        >>> print(el("p", "1 < 2", el("b", "yes"), class_="note", hidden=None))
        <p class="note">1 &lt; 2<b>yes</b></p>
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{join(*children)}</{name}>")


def join(*children: str | None) -> Markup:
    """Markup and text, one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child))


def data(identifier: str, value: Any) -> Markup:
    """A value for the script, where no text of it can end the element that holds it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    safe = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return el("script", Markup(safe), type="application/json", id=identifier)


def px(value: float) -> str:
    """A length in as few characters as a tenth of a pixel needs."""
    return f"{value:.1f}".removesuffix(".0")


_EMPTY = {"meta", "input", "link", "br", "hr"}


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
    return el("svg", el("defs", *found), width=0, height=0, class_="defs", aria_hidden="true")


def rules() -> str:
    """The style of the classes."""
    plain = [f".k{key}{{fill:var(--c{key})}}" for key in range(HUES)]
    return join(*map(Markup, plain + [f".k{k}{{fill:url(#k{k})}}" for k in range(HUES, HUES * len(PATTERNS))]))
