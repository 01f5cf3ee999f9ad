"""The finding of a check: a code, the place in the plan, the reason, and what to write instead."""

from __future__ import annotations

import attrs

from shardtensor.spec.diagnostics import Source


@attrs.frozen(eq=False)
class Origin:
    """A range of a plan's text.

    Attributes:
        source: the text and its file.
        span: the first character and the one after the last.
        through: if `span` is the call of a style, the line of the style.
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
        origin: the text that is wrong; None if there is none (an option of the command line).
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
        """The lines below the fault."""
        rows = [f"{key}: {value}" for key, value in (("why", self.why), ("fix", self.fix)) if value]
        return rows + [f"note: {note}" for note in self.notes]

    def __str__(self) -> str:
        name = f"{self.tensor}: " if self.origin is None and self.tensor and self.tensor not in self.fault else ""
        head = f"{self.severity}[{self.code}]: {name}{self.fault}"
        rows = [f"  {row}" for row in self.rows]
        if self.origin is None:
            return "\n".join([head, *rows])
        return "\n".join([f"{self.origin}: {head}", *self.origin.source.excerpt(self.origin.span), *rows])
