"""One line of a plan: what it says of which tensors or modules, every number and style already filled in."""

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
    """What is said of the tensors or modules that a pattern stands for.

    Attributes:
        pattern: dotted, from the root; of modules for all kinds but ``"tensor"``, where it stands for the tensors of
            that name and for all below modules of that name.
        kind: ``"tensor"``: how tensors lie; ``"in"``, ``"out"``: how a value passes; ``"local"``: an attribute that
            counts becomes the rank's share; ``"use"``: a registered hook.
        value: a spec (or a `Sharder`, in Python) for ``"tensor"``, a one-dim spec for ``"local"``, a `Flow` for
            ``"in"`` and ``"out"``, a `Hook` for ``"use"``.
        name: of the argument (``in mask``), the result (``out 1``) or the attribute; empty for the first one.
        module: the pattern of the module that a style or a block stood before: it has to match modules. Empty where a
            rule stands by itself.
        is_optional: it may match nothing.
        depth: how many includes deep it was written; 0 is the file itself.
        origin: of what is said, the layout or the flow; through the line of the style where a style says it. None for
            rules made in Python.
        pattern_origin: of the pattern.
        other: what was not chosen: the text of the condition, when the ``else`` side was taken.
    """

    pattern: str
    kind: Literal["tensor", "in", "out", "local", "use"] = "tensor"
    value: Any = None
    name: str = ""
    module: str = ""
    is_optional: bool = False
    depth: int = 0
    origin: Origin | None = None
    other: str = ""
    pattern_origin: Origin | None = None


@attrs.frozen
class Hook:
    """The call of a registered hook, ``use dispatch(ep, top_k=2)``: axes by name, the rest numbers or layouts."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Store:
    """``store PATTERN: flat(dp) by GLOB, ...``: how parameters are kept while nobody computes with them.

    Attributes:
        flat: over which axes, with which grain; None for ``replicate``: kept as they compute.
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
    """``tie A = B``: A takes the layout of B and is one tensor with it; the patterns have alternatives pair by pair."""

    pattern: str
    to: str
    origin: Origin | None = None


@attrs.frozen(eq=False)
class Dims:
    """``dims PATTERN (out = 4096, in = 4096)``: dim names and sizes of tensors, for checks without the model.

    Attributes:
        blocks: dims that are several laid end to end, ``out = (512, 128, 128)``, with the length of each.
    """

    pattern: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    origin: Origin | None = None
    blocks: tuple[tuple[str, tuple[int, ...]], ...] = ()


@attrs.frozen(eq=False)
class Unmatched:
    """``unmatched: replicate``: the layout of tensors that no line stands for."""

    spec: Spec
    depth: int = 0
    origin: Origin | None = None


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
