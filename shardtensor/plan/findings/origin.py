"""Where something in a plan was written."""

from __future__ import annotations

import attrs

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
