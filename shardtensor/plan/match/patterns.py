"""Patterns of dotted names: ``layers.*.mlp.{gate,up}_proj.weight``.

``*`` matches any characters of one segment, ``**`` any number of whole segments, ``{a,b}`` one of the listed texts,
``<ep>`` a whole number (these are distributed over the axis), ``<32>`` one below 32; ``"in"`` and all other text match
themselves.
No pattern takes more than (its length) x (the name's length) steps to match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any, Literal

import attrs

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
"""Segments that wrapper modules add to names; patterns are matched without them. The last is of peft's adapters."""

_TOKEN = re.compile(r'"([^"]*)"|(\*+)|\{([^{}]*)\}|<(\w+)>|([^"*{<]+|.)', re.DOTALL)


@attrs.frozen(cache_hash=True)
class Part:
    """A part of a segment.

    Attributes:
        text: as it is written: ``*``, ``**``, ``{a,b}``, ``<ep>``, or the text that it matches.
        options: the texts that it matches, if they are listed.
    """

    kind: Literal["text", "any", "deep", "one_of", "number"]
    text: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def ends(self, text: Sequence[str], starts: set[int]) -> set[int]:
        """Return where a match in `text` may end that starts at one of `starts`."""
        if self.options:
            assert isinstance(text, str)
            return {at + len(option) for option in self.options for at in starts if text.startswith(option, at)}
        if self.kind != "number":
            return set(range(min(starts), len(text) + 1))
        found, axis = set[int](), self.text[1:-1]
        limit = int(axis) if axis.isdecimal() else None
        for start in starts:
            at = start
            while at < len(text) and text[at] in "0123456789":
                at += 1
                if limit is None or int("".join(text[start:at])) < limit:
                    found.add(at)
        return found


def one_of(options: Iterable[str]) -> Part:
    """Return the part ``{a,b}``."""
    options = tuple(dict.fromkeys(options))
    return Part("one_of", f"{{{','.join(options)}}}", options)


@attrs.frozen(cache_hash=True)
class Segment:
    """The text between two dots of a pattern."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    @cached_property
    def is_deep(self) -> bool:
        """Whether it is ``**``."""
        return self.parts[:1] == _DEEP

    @cached_property
    def literal(self) -> str | None:
        """The one text that it matches; None if there may be several."""
        return str(self) if all(part.kind == "text" for part in self.parts) else None

    def captures(self, text: str) -> tuple[str, ...] | None:
        """Return the text that each of its wildcards matches in `text`; None if it does not match."""
        return _captured(self, text)

    def ends(self, words: Sequence[str], starts: set[int]) -> set[int]:
        """Return where a match in the words of a name may end that starts at one of `starts`."""
        if self.is_deep:
            return self.parts[0].ends(words, starts)
        return {at + 1 for at in starts if at < len(words) and _captured(self, words[at]) is not None}


_DEEP = (Part("deep", "**"),)


@lru_cache(maxsize=1 << 16)
def _captured(segment: Segment, text: str) -> tuple[str, ...] | None:
    spans = _spans(segment.parts, text)
    if spans is None:
        return None
    found = zip(segment.parts, spans, strict=True)
    return tuple(text[start:end] for part, (start, end) in found if part.kind != "text")


def _spans(items: Sequence[Any], over: Sequence[str], is_open: bool = False) -> list[tuple[int, int]] | None:
    """Return the range of each item in `over`, which they match one after the other (`is_open`: its beginning)."""
    stages = [{0}]
    for item in items:
        reached = item.ends(over, stages[-1])
        if not reached:
            return None
        stages.append(reached)
    if not is_open and len(over) not in stages[-1]:
        return None
    end = min(stages[-1]) if is_open else len(over)
    spans = []
    for item, starts in zip(reversed(items), reversed(stages[:-1]), strict=True):
        start = min(at for at in starts if end in item.ends(over, {at}))
        spans.append((start, end))
        end = start
    return spans[::-1]


@attrs.frozen(eq=False)
class Pattern:
    """A parsed pattern."""

    segments: tuple[Segment, ...]

    @cached_property
    def wildcards(self) -> tuple[Part, ...]:
        """The wildcards in order; `captures` returns one text for each."""
        return tuple(part for segment in self.segments for part in segment.parts if part.kind != "text")

    def captures(self, name: str, is_below: bool = False) -> tuple[str, ...] | None:
        """Return what the wildcards match in a name (`is_below`: or in a module above it); None if it does not match.

        Example:
            >>> pattern("**.layers.*.{q,k}_proj").captures("model.layers.3.k_proj")
            ('model', '3', 'k')
        """
        words = name.split(".") if name else []
        spans: list[tuple[int, int]] | None
        if self.is_deep:
            spans = _spans(self.segments, words, is_below)
        else:  # each segment has one place
            is_long = len(words) == len(self.segments) or (is_below and len(words) > len(self.segments))
            spans = [(i, i + 1) for i in range(len(self.segments))] if is_long else None
        found: list[str] = []
        for segment, (start, end) in zip(self.segments, spans or (), strict=spans is not None):
            held = (".".join(words[start:end]),) if segment.is_deep else _captured(segment, words[start])
            if held is None:
                return None
            found += held
        return None if spans is None else tuple(found)

    @cached_property
    def is_deep(self) -> bool:
        """Whether some part of it matches any number of segments."""
        return any(segment.is_deep for segment in self.segments)


@lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Parse a pattern."""
    segments: list[list[Part]] = [[]]
    for quoted, stars, braces, axis, plain in _TOKEN.findall(text):
        if stars:
            segments[-1].append(_DEEP[0] if stars == "**" else Part("any", "*"))
        elif braces:
            segments[-1].append(one_of(braces.split(",")))
        elif axis:
            segments[-1].append(Part("number", f"<{axis}>"))
        else:
            first, *more = (plain or quoted).split(".")
            segments[-1].append(Part("text", first, (first,)))
            segments += [[Part("text", each, (each,))] for each in more]
    adapted = [Part("text", WRAPPERS[-1], WRAPPERS[-1:])]  # patterns may name it: it looks like a layer
    return Pattern(() if not text else tuple(_segment(tuple(parts)) for parts in segments if parts != adapted))


@lru_cache(maxsize=4096)
def _segment(parts: tuple[Part, ...]) -> Segment:
    """Return the segment of these parts: one object for equal ones, so that look-ups need no comparison."""
    found = tuple(part for part in parts if part.kind != "text" or part.text)
    if found == _DEEP:
        return Segment(found)
    return Segment(tuple(Part("any", "*") if part.kind == "deep" else part for part in found))


def matches(text: str, name: str) -> bool:
    """Whether a pattern matches a dotted name.

    Example:
        >>> matches("layers.*.{q,k}.weight", "layers.3.q.weight"), matches("**.bias", "bias"), matches("a.*", "a.b.c")
        (True, True, False)
    """
    return pattern(text).captures(name) is not None


CHOICE = re.compile(r"\{([^{}]*)\}|<(\d+)>")


def expanded(pattern: str) -> Iterator[str]:
    """Yield all names that a pattern of braces and numbers matches, in order.

    Example:
        >>> list(expanded("h.<2>.{q,k}"))
        ['h.0.q', 'h.0.k', 'h.1.q', 'h.1.k']
    """
    choice = CHOICE.search(pattern)
    if choice is None:
        yield pattern.replace('"', "")
        return
    for picked in range(int(choice[2])) if choice[2] else choice[1].split(","):
        yield from expanded(f"{pattern[: choice.start()]}{picked}{pattern[choice.end() :]}")


def unwrapped(name: str) -> str:
    """Return a name without the segments of wrapper modules.

    Example:
        >>> unwrapped("_orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight")
        'layers.0.mlp.weight'
    """
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def nearest(text: str, names: Iterable[str]) -> str:
    """Return the names most similar to a pattern, for messages."""
    names = list(names)
    return ", ".join(get_close_matches(text, names, 3, 0.5) or names[:8]) or "(none)"


def starred(path: str) -> str:
    """Return a path with its numbers as ``*``.

    Example:
        >>> starred("model.layers.11.mlp")
        'model.layers.*.mlp'
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
