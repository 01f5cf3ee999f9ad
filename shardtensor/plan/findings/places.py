"""Places in a plan's text for findings: the pattern before a layout, a brace, a style."""

from __future__ import annotations

import re

from shardtensor.plan.findings.finding import Origin
from shardtensor.plan.line import Line
from shardtensor.plan.plan import Plan


def statement(origin: Origin | None, other: object = None) -> object:
    """What is equal for all that one statement of the text made; `other` for what no text made."""
    return (origin.source.file, origin.span) if origin is not None else id(other)


def origin_of(line: Line | None) -> Origin | None:
    """Where a line says what it says; None without a line, or where no text says it."""
    return line.origin if line is not None else None


def pattern_place(line: Line) -> Origin | None:
    """Where the pattern of a rule stands, or what it says where the pattern is not known."""
    return line.pattern_origin or line.origin


def name_place(line: Line) -> Origin | None:
    """Where the name stands that a line gives what it says to (``in mask: replicate``); else what it says."""
    said = line.origin
    if said is None:
        return None
    found = re.search(rf"\b({re.escape(line.name)})\s*:\s*$", said.source.text[: said.span[0]])
    return said if found is None else Origin(said.source, found.span(1))


_BLOCK = re.compile(r"^[ \t]*(?:optional[ \t]+)*(\S+)[ \t]*\{[ \t]*(?:#.*)?$", re.MULTILINE)


def segment_place(line: Line, segment: str) -> Origin | None:
    """Where one segment of a line's pattern is written: before the line's colon, or before a block around it."""
    place = pattern_place(line)
    if place is None or segment in place.text.split("."):
        return place
    blocks = [found for found in _BLOCK.finditer(place.source.text, 0, place.span[0]) if segment in found[1].split(".")]
    return Origin(place.source, blocks[-1].span(1)) if blocks else place


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
