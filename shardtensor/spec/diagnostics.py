"""Errors that point at text: the line, a caret, why it is wrong, and what to write instead.

.. code-block:: text

    <spec>:1:6: error[E102]: no modifier is called `unti`
        1 | [tp unti(128), -]
          |     ^^^^
      why: after an axis may stand unit, blocks, pad, sizes, balanced
      fix: did you mean `unit`?
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import attrs

from shardtensor.errors import SpecError

WIDTH = 100
"""Of a long line, so many characters round the fault are shown."""

MOST_WORDS = 200
"""Among so many is the nearest looked for."""


@attrs.frozen
class Fault:
    """What an error of a text says, in parts.

    Attributes:
        span: the characters that are wrong.
        text: what is wrong; one line.
        facts: further lines, ``why`` and ``fix`` among them.
        is_of_value: a value refused what it was given; the text that gave it may stand elsewhere.
    """

    span: tuple[int, int]
    text: str
    facts: tuple[tuple[str, str], ...] = ()
    is_of_value: bool = False


@attrs.frozen
class Source:
    """A text and where it came from."""

    text: str
    file: str = "<spec>"

    def error(
        self, code: str, span: tuple[int, int], fault: str, why: str = "", fix: str = "", kind: type = SpecError
    ) -> SpecError:
        """Return the error that `fault` is at the characters ``span[0]`` to ``span[1]``."""
        facts = tuple((key, value) for key, value in (("why", why), ("fix", fix)) if value)
        return self._error(code, Fault(span, fault, facts), kind)

    def locate(self, error: SpecError, span: tuple[int, int]) -> SpecError:
        """Return the error of a value as the error of the text that made it, facts as rows below the caret."""
        return self._error(error.code or "E102", Fault(span, error.fault, tuple(error.rows), True), type(error))

    def excerpt(self, span: tuple[int, int]) -> list[str]:
        """Return the line on which a span begins, and a line with a caret under it."""
        start, end = span
        begin = self.text.rfind("\n", 0, start) + 1
        stop = self.text.find("\n", start)
        stop = len(self.text) if stop < 0 else stop
        shown, col = self.text[begin:stop], start - begin
        width = max(1, min(end - start, len(shown) - col))
        cut = max(0, col - WIDTH // 2)
        shown, at = printable(shown[cut : cut + WIDTH]), col - cut
        if cut:
            shown, at = "..." + shown, at + 3
        if cut + WIDTH < stop - begin:
            shown += "..."
        caret = " " * at + "^" * min(width, max(1, WIDTH - (col - cut)))
        return [f"{self.text.count(chr(10), 0, start) + 1:5} | {shown}", f"      | {caret}"]

    def _error(self, code: str, fault: Fault, kind: type[SpecError]) -> SpecError:
        start = fault.span[0]
        line, col = self.text.count("\n", 0, start) + 1, start - self.text.rfind("\n", 0, start)
        rows = [f"  {key}: {value}" for key, value in fault.facts]
        head = f"{self.file}:{line}:{col}: error[{code}]: {printable(fault.text)}"
        error = kind("\n".join([head, *self.excerpt(fault.span), *rows]), code=code, file=self.file, line=line, col=col)
        error.parts = (self, fault)
        return error


def printable(text: str) -> str:
    """`text` with what would move the caret, or not print at all, as question marks."""
    return "".join(char if char.isprintable() else "?" for char in text)


def nearest(word: str, words: Iterable[str]) -> str:
    """The word that was perhaps meant, as a way out; empty when none is near."""
    near = get_close_matches(word, [*words][:MOST_WORDS], n=1) if len(word) <= WIDTH else []
    return f"did you mean `{near[0]}`?" if near else ""


def listed(words: Iterable[str]) -> str:
    """Words as a sentence lists them.

    Example:
        >>> listed(["an axis", "`-`", "`...`"])
        'an axis, `-` or `...`'
    """
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
