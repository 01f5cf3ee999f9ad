"""Where in a plan's text something stands that a finding speaks of: the pattern before a layout, a brace, a style."""

from __future__ import annotations

import re

from shardtensor.plan.line import Line
from shardtensor.plan.origin import Origin
from shardtensor.plan.plan import Plan


def statement(origin: Origin | None, other: object = None) -> object:
    """What is equal for all that one statement of the text made; `other` for what no text made."""
    return (origin.source.file, origin.span) if origin is not None else id(other)


def pattern_place(line: Line) -> Origin | None:
    """Where the pattern of a rule stands, or what it says where the pattern is not known."""
    return line.pattern_origin or line.origin


def place_above(origin: Origin | None, text: str) -> Origin | None:
    """Where a part of a pattern stands: the nearest one at or above a place; the place itself when there is none."""
    if origin is None or not text:
        return origin
    source = origin.source
    end = source.text.find("\n", origin.span[1])
    at = source.text.rfind(text, 0, end if end >= 0 else len(source.text))
    return origin if at < 0 else Origin(source, (at, at + len(text)))


def mesh_place(plan: Plan) -> Origin | None:
    """Where the mesh of a plan is written."""
    for source in plan.sources:
        found = re.search(r"^mesh\b[^#\n]*", source.text, re.MULTILINE)
        if found is not None:
            return Origin(source, (found.start(), found.start() + len(found[0].rstrip())))
    return None


def style_note(origin: Origin | None, what: str) -> tuple[str, ...]:
    """The note that says which line of a style made a layout or a flow."""
    through = origin.through if origin is not None else None
    while through is not None and through.through is not None:
        through = through.through
    if through is None:
        return ()
    return (f"the {what} is `{' '.join(through.text.split())}`, {through.source.file}:{through.line}",)
