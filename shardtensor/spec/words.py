"""The words of one-tensor specs, in one table: what stands before brackets, where, and what it takes."""

from __future__ import annotations

from typing import Literal

import attrs

Place = Literal["form", "modifier", "suffix", "function", "style", "hook"]


@attrs.frozen
class Word:
    """A word, where it stands, and its arguments.

    Args:
        params: name and kind of each argument, in order; the first `required` must be given.
        rest: kind of each of any number of arguments without names.
        usage: an example.
    """

    name: str
    place: Place
    usage: str
    params: dict[str, str] = attrs.field(factory=dict)
    required: int = 0
    rest: str = ""

    @property
    def is_bare(self) -> bool:
        """Does the word stand without brackets?"""
        return not self.params and not self.rest


WORDS = {
    word.name: word
    for word in (
        Word("replicate", "form", "replicate"),
        Word(
            "chunk",
            "form",
            'chunk(dim=0, placements=["rank:0-3/cuda:0-3"])',
            {"dim": "number", "placements": "places", "sizes": "numbers"},
            required=2,
        ),
        Word(
            "grid",
            "form",
            'grid(splits=(2, 2), placements=["rank:0-3/cuda:0-3"])',
            {"splits": "numbers", "placements": "places"},
            required=2,
        ),
        Word("enum", "form", 'enum([0:5, 0:4] @ "rank:0/cuda:0", [5:10, 0:4] @ "rank:1/cuda:1")', rest="box"),
        Word("pad", "modifier", "pad(64)", {"pad": "number"}, required=1),
        Word("blocks", "modifier", "blocks(3)", rest="number"),
        Word("unit", "modifier", "unit(128)", {"unit": "number"}, required=1),
        Word("sizes", "modifier", "sizes(5, 3)", rest="number"),
        Word("balanced", "modifier", "balanced"),
        Word("flat", "suffix", "flat(dp)", {"axes": "axes", "unit": "number or row", "sizes": "numbers"}, required=1),
        Word("only", "suffix", "only(ep, 1)", {"axis": "axis", "index": "number"}, required=2),
        Word("partial", "suffix", "partial(tp)", {"axes": "axes", "op": "word"}, required=1),
    )
}

STANDS = {
    "form": "begins a spec",
    "modifier": "stands after an axis, inside the square brackets",
    "suffix": "stands after the square brackets",
}

WANTED = {
    "number": "a number",
    "number or row": "a number or `row`",
    "numbers": "numbers in round brackets, as in `(5, 3)` or `(5,)`",
    "axis": "an axis",
    "axes": "an axis, or a product as in `tp*dp`",
    "word": "a word",
    "places": 'a list of placements, as in `["rank:0-3/cuda:0-3"]`',
    "box": 'a box, as in `[0:5, 0:4] @ "rank:0/cuda:0"`',
}


def words_for(*places: Place) -> list[str]:
    """The words that stand in these places."""
    return [word.name for word in WORDS.values() if word.place in places]
