"""Statements of a plan: the rules for tensors and modules, with all numbers and styles filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs

from shardtensor.plan.findings.finding import Origin
from shardtensor.spec.nodes import Spec
from shardtensor.spec.parts import Flat

if TYPE_CHECKING:
    from shardtensor.plan.plan import Plan


@attrs.frozen(eq=False)
class Line:
    """A rule for the tensors or modules that a pattern matches.

    Attributes:
        pattern: dotted, from the root. For the kind ``"tensor"`` it matches the tensors of that name and all tensors
            below modules of that name; for the others it matches modules.
        kind: ``"tensor"``: a layout; ``"in"``, ``"out"``: a flow; ``"local"``: an attribute that counts becomes the
            rank's share; ``"use"``: a registered hook.
        value: a spec (or a `Sharder`, in Python) for ``"tensor"``, a one-dim spec for ``"local"``, a `Flow` for
            ``"in"`` and ``"out"``, a `Hook` for ``"use"``.
        name: of the argument (``in mask``), the result (``out 1``) or the attribute; empty for the first one.
        module: the pattern before the style or block of this rule, which must match modules. Empty for a rule without
            either.
        is_optional: it may match nothing.
        origin: of the layout or the flow; if a style made it, the call, through the line of the style. None for rules
            made in Python.
        pattern_origin: of the pattern.
    """

    pattern: str
    kind: Literal["tensor", "in", "out", "local", "use"] = "tensor"
    value: Any = None
    name: str = ""
    module: str = ""
    is_optional: bool = False
    origin: Origin | None = None
    pattern_origin: Origin | None = None


@attrs.frozen
class Hook:
    """The call of a registered hook, ``use dispatch(ep, top_k=2)``: axes by name, the rest numbers or layouts."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Store:
    """``store PATTERN: flat(dp) by GLOB, ...``: how parameters are stored while no module computes with them.

    Attributes:
        flat: the axes and the grain; None for ``replicate``: stored as in the computation.
        by: patterns of the modules whose parameters are gathered together.
        origin, pattern_origin: of `flat`, and of the pattern.
    """

    pattern: str
    flat: Flat | None
    by: tuple[str, ...] = ()
    origin: Origin | None = None
    pattern_origin: Origin | None = None


@attrs.frozen(eq=False)
class Tie:
    """``tie A = B``: A is the same tensor as B, with the layout of B; alternatives of the patterns match in pairs."""

    pattern: str
    to: str
    origin: Origin | None = None


@attrs.frozen(eq=False)
class Dims:
    """``dims PATTERN (out = 4096, in = 4096)``: dim names and sizes of tensors, for checks without the model.

    Attributes:
        blocks: dims of several consecutive blocks, ``out = (512, 128, 128)``, with the length of each block.
    """

    pattern: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    origin: Origin | None = None
    blocks: tuple[tuple[str, tuple[int, ...]], ...] = ()


@attrs.frozen(eq=False)
class Unmatched:
    """``unmatched: replicate``: the layout of tensors that no line matches."""

    spec: Spec
    depth: int = 0
    origin: Origin | None = None


def statement(origin: Origin | None, other: object = None) -> object:
    """Return a key that all lines of one statement of the text share; that of `other` if no text made it."""
    return (origin.source.file, origin.span) if origin is not None else id(other)


def origin_of(line: Line | None) -> Origin | None:
    """Return the origin of a line; None without a line, or if no text made it."""
    return line.origin if line is not None else None


def pattern_place(line: Line) -> Origin | None:
    """Return the place of a rule's pattern, or of its value if the pattern's is not known."""
    return line.pattern_origin or line.origin


def name_place(line: Line) -> Origin | None:
    """Return the place of a line's name (``mask`` in ``in mask: replicate``); else that of its value."""
    origin = line.origin
    if origin is None:
        return None
    found = re.search(rf"\b({re.escape(line.name)})\s*:\s*$", origin.source.text[: origin.span[0]])
    return origin if found is None else Origin(origin.source, found.span(1))


_BLOCK = re.compile(r"^[ \t]*(?:optional[ \t]+)*(\S+)[ \t]*\{[ \t]*(?:#.*)?$", re.MULTILINE)


def segment_place(line: Line, segment: str) -> Origin | None:
    """Return the place of one segment of a line's pattern: before the line's colon, or before a block around it."""
    place = pattern_place(line)
    if place is None or segment in place.text.split("."):
        return place
    blocks = [found for found in _BLOCK.finditer(place.source.text, 0, place.span[0]) if segment in found[1].split(".")]
    return Origin(place.source, blocks[-1].span(1)) if blocks else place


def mesh_place(plan: Plan) -> Origin | None:
    """Return the place of a plan's mesh."""
    for source in plan.sources:
        found = re.search(r"^mesh\b[^#\n]*", source.text, re.MULTILINE)
        if found is not None:
            return Origin(source, (found.start(), found.start() + len(found[0].rstrip())))
    return None


def style_note(origin: Origin | None, what: str) -> tuple[str, ...]:
    """Return a note with the line of the style that made a layout or a flow; empty if none did."""
    through = origin.through if origin is not None else None
    while through is not None and through.through is not None:
        through = through.through
    if through is None:
        return ()
    return (f"the {what} is `{' '.join(through.text.split())}`, {through.source.file}:{through.line}",)
