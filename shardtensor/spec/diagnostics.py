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
"""The number of characters around the fault that an error shows of a long line."""

MOST_WORDS = 200
"""The largest number of words that `nearest` compares."""


@attrs.frozen
class Source:
    """A text and where it came from."""

    text: str
    file: str = "<spec>"

    def error(self, code: str, span: tuple[int, int], fault: str, why: str = "", fix: str = "") -> SpecError:
        """Return the error for a `fault` at the characters ``span[0]`` to ``span[1]``."""
        return self._at(span, SpecError(fault, {"why": why} if why else {}, fix, code=code), False)

    def locate(self, error: SpecError, span: tuple[int, int]) -> SpecError:
        """Return the error of a value, located at the text that gave the value; facts are rows below the caret."""
        return self._at(span, error, True)

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

    def _at(self, span: tuple[int, int], error: SpecError, is_of_value: bool) -> SpecError:
        start = span[0]
        error.file, error.line = self.file, self.text.count("\n", 0, start) + 1
        error.col, error.code = start - self.text.rfind("\n", 0, start), error.code or "E102"
        error.parts = (self, span, is_of_value)
        rows = [f"  {key}: {value}" for key, value in error.rows]
        head = f"{self.file}:{error.line}:{error.col}: error[{error.code}]: {printable(error.fault)}"
        error.args = ("\n".join([head, *self.excerpt(span), *rows]),)
        return error


def printable(text: str) -> str:
    """Return `text` with question marks for characters that would move the caret or do not print."""
    return "".join(char if char.isprintable() else "?" for char in text)


def nearest(word: str, words: Iterable[str]) -> str:
    """Return a fix with the most similar word; empty if none is similar."""
    near = get_close_matches(word, [*words][:MOST_WORDS], n=1) if len(word) <= WIDTH else []
    return f"did you mean `{near[0]}`?" if near else ""


def listed(words: Iterable[str]) -> str:
    """Return words as a list in a sentence.

    Example:
        >>> listed(["an axis", "`-`", "`...`"])
        'an axis, `-` or `...`'
    """
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
