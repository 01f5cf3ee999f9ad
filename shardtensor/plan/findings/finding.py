"""What a check finds: a code, the place in the plan, why, and what to write instead."""

from __future__ import annotations

import re

import attrs

from shardtensor.plan.line import Line
from shardtensor.plan.plan import Plan
from shardtensor.spec.diagnostics import Source


@attrs.frozen(eq=False)
class Origin:
    """A stretch of a plan's text.

    Attributes:
        source: the text, and the file it came from.
        span: first character and the one after the last.
        through: where the text stands that this made: the line of a style, when `span` is the call of the style.
    """

    source: Source
    span: tuple[int, int]
    through: Origin | None = None

    @property
    def line(self) -> int:
        """Counted from 1."""
        return self.source.text.count("\n", 0, self.span[0]) + 1

    @property
    def col(self) -> int:
        """Counted from 1."""
        return self.span[0] - self.source.text.rfind("\n", 0, self.span[0])

    @property
    def text(self) -> str:
        return self.source.text[self.span[0] : self.span[1]]

    def __str__(self) -> str:
        return f"{self.source.file}:{self.line}:{self.col}"


@attrs.frozen(eq=False)
class Finding:
    """One finding.

    Attributes:
        code: ``E...`` is an error, ``W...`` a warning, ``N...`` a note; the table is in specs/README.md.
        fault: what is wrong, with the user's own numbers; one line.
        origin: the text that is wrong; None where no text is (an option of the command line).
        why: the rule that is broken, with the values that break it.
        fix: one thing to write instead.
        notes: other places, how many tensors fail in the same way.
        tensor: the tensor or module concerned, for folding findings that repeat over layers.
    """

    code: str
    fault: str
    origin: Origin | None = None
    why: str = ""
    fix: str = ""
    notes: tuple[str, ...] = ()
    tensor: str = ""

    @property
    def severity(self) -> str:
        """``error``, ``warning`` or ``note``."""
        return {"E": "error", "W": "warning", "N": "note"}[self.code[0]]

    @property
    def rows(self) -> list[str]:
        """What stands below the fault."""
        rows = [f"{key}: {value}" for key, value in (("why", self.why), ("fix", self.fix)) if value]
        return rows + [f"note: {note}" for note in self.notes]

    def __str__(self) -> str:
        name = f"{self.tensor}: " if self.origin is None and self.tensor and self.tensor not in self.fault else ""
        head = f"{self.severity}[{self.code}]: {name}{self.fault}"
        rows = [f"  {row}" for row in self.rows]
        if self.origin is None:
            return "\n".join([head, *rows])
        return "\n".join([f"{self.origin}: {head}", *self.origin.source.excerpt(self.origin.span), *rows])


# -- places ------------------------------------------------------------------------------------------------------------


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
