"""Patterns of dotted names: ``layers.*.mlp.{gate,up}_proj.weight``.

``*`` stands for any characters of one segment, ``**`` for any number of whole segments, ``{a,b}`` for one of those
listed, ``<ep>`` for a whole number that is dealt over an axis, ``<32>`` for one below 32; ``"in"`` and anything else
for itself.
No pattern takes more than (its length) x (the name's length) steps to match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any, Protocol

import attrs

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Segments that wrappers put into names; patterns do not see them."""

_TOKEN = re.compile(r'"([^"]*)"|(\*+)|\{([^{}]*)\}|<(\w+)>|([^"*{<]+|.)', re.DOTALL)


class Wildcard(Protocol):
    """A part of a segment that stands for more than one text."""

    def ends(self, text: str, starts: set[int]) -> set[int]:
        """Where it may end in `text`, when it starts at one of `starts`."""
        ...


@attrs.frozen
class Anything:
    """``*``."""

    def __str__(self) -> str:
        return "*"

    def ends(self, text: str, starts: set[int]) -> set[int]:
        return set(range(min(starts), len(text) + 1))


@attrs.frozen
class OneOf:
    """``{a,b}``."""

    options: tuple[str, ...]

    def __str__(self) -> str:
        return "{" + ",".join(self.options) + "}"

    def ends(self, text: str, starts: set[int]) -> set[int]:
        return {at + len(option) for option in self.options for at in starts if text.startswith(option, at)}


@attrs.frozen
class Number:
    """``<ep>``; with a number for its name, ``<32>``, only the numbers below that."""

    axis: str

    def __str__(self) -> str:
        return f"<{self.axis}>"

    def ends(self, text: str, starts: set[int]) -> set[int]:
        found: set[int] = set()
        for start in starts:
            at = start
            while at < len(text) and text[at] in "0123456789":
                at += 1
                if not self.axis.isdecimal() or int(text[start:at]) < int(self.axis):
                    found.add(at)
        return found


@attrs.frozen
class _Text:
    text: str

    def __str__(self) -> str:
        return self.text

    def ends(self, text: str, starts: set[int]) -> set[int]:
        return {at + len(self.text) for at in starts if text.startswith(self.text, at)}


@attrs.frozen(cache_hash=True)
class Deep:
    """``**``."""

    def __str__(self) -> str:
        return "**"

    def ends(self, segments: Sequence[str], starts: set[int]) -> set[int]:
        return set(range(min(starts), len(segments) + 1))


@attrs.frozen(cache_hash=True)
class Segment:
    """What stands between two dots of a pattern."""

    parts: tuple[Wildcard, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    @property
    def literal(self) -> str | None:
        """The one text it stands for; None where there may be several."""
        texts = [part.text for part in self.parts if isinstance(part, _Text)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    def captures(self, text: str) -> tuple[str, ...] | None:
        """What each of its wildcards stands for in `text`; None when it does not match."""
        return _captured(self, text)

    def ends(self, segments: Sequence[str], starts: set[int]) -> set[int]:
        return {at + 1 for at in starts if at < len(segments) and _captured(self, segments[at]) is not None}


@lru_cache(maxsize=1 << 16)
def _captured(segment: Segment, text: str) -> tuple[str, ...] | None:
    spans = _spans(segment.parts, text)
    if spans is None:
        return None
    return tuple(
        text[start:end] for part, (start, end) in zip(segment.parts, spans, strict=True) if not isinstance(part, _Text)
    )


def _spans(items: Sequence[Any], over: Sequence[str], is_open: bool = False) -> list[tuple[int, int]] | None:
    """Where each item lies when all of them lie end to end over `over` (`is_open`: over its beginning)."""
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
    """A pattern, read."""

    segments: tuple[Segment | Deep, ...]

    @cached_property
    def wildcards(self) -> tuple[Wildcard | Deep, ...]:
        """In order; what `captures` gives one text for each of."""
        return tuple(
            part
            for segment in self.segments
            for part in ((segment,) if isinstance(segment, Deep) else segment.parts)
            if not isinstance(part, _Text)
        )

    def captures(self, name: str, is_below: bool = False) -> tuple[str, ...] | None:
        """What the wildcards stand for in a name (`is_below`: or in a module above it); None when it does not match.

        Example:
            >>> pattern("**.layers.*.{q,k}_proj").captures("model.layers.3.k_proj")
            ('model', '3', 'k')
        """
        words = name.split(".") if name else []
        if not self.is_deep:  # each segment stands at one place
            return self._one_by_one(words, is_below)
        spans = _spans(self.segments, words, is_below)
        if spans is None:
            return None
        found: list[str] = []
        for segment, (start, end) in zip(self.segments, spans, strict=True):
            held = words[start:end]
            found += [".".join(held)] if isinstance(segment, Deep) else segment.captures(held[0]) or ()
        return tuple(found)

    @cached_property
    def is_deep(self) -> bool:
        """Whether some part of it stands for any number of segments."""
        return any(isinstance(segment, Deep) for segment in self.segments)

    def _one_by_one(self, words: Sequence[str], is_below: bool) -> tuple[str, ...] | None:
        if len(words) != len(self.segments) and not (is_below and len(words) > len(self.segments)):
            return None
        found: list[str] = []
        for segment, word in zip(self.segments, words, strict=False):
            held = _captured(segment, word)
            if held is None:
                return None
            found += held
        return tuple(found)

    def filled(self, values: Sequence[str]) -> str:
        """The name that the pattern is, with one text for each of `wildcards`.

        Example:
            >>> pattern("layers.*.{q,k}_proj").filled(["3", "k"])
            'layers.3.k_proj'
        """
        left = list(values)
        words = []
        for segment in self.segments:
            if isinstance(segment, Deep):
                words += [left.pop(0)]
            else:
                words += ["".join(part.text if isinstance(part, _Text) else left.pop(0) for part in segment.parts)]
        return ".".join(word for word in words if word)


@lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Read a pattern."""
    segments: list[list[Any]] = [[]]
    for quoted, stars, braces, axis, plain in _TOKEN.findall(text):
        if stars:
            segments[-1].append(Deep() if stars == "**" else Anything())
        elif braces:
            segments[-1].append(OneOf(tuple(dict.fromkeys(braces.split(",")))))
        elif axis:
            segments[-1].append(Number(axis))
        else:
            first, *more = (plain or quoted).split(".")
            segments[-1].append(_Text(first))
            segments += [[_Text(each)] for each in more]
    return Pattern(() if not text else tuple(map(_segment, segments)))


def _segment(parts: list[Any]) -> Segment | Deep:
    parts = [part for part in parts if part != _Text("")]
    if len(parts) == 1 and isinstance(parts[0], Deep):
        return parts[0]
    return _segment_of(tuple(Anything() if isinstance(part, Deep) else part for part in parts))


@lru_cache(maxsize=4096)
def _segment_of(parts: tuple[Wildcard, ...]) -> Segment:
    """Equal segments are one, so that finding what is known of them compares nothing."""
    return Segment(parts)


def matches(text: str, name: str) -> bool:
    """Whether a pattern stands for a dotted name.

    Example:
        >>> matches("layers.*.{q,k}.weight", "layers.3.q.weight"), matches("**.bias", "bias"), matches("a.*", "a.b.c")
        (True, True, False)
    """
    return pattern(text).captures(name) is not None


def is_below(text: str, name: str) -> bool:
    """Whether a name lies below a module that the pattern stands for.

    Example:
        >>> is_below("mlp", "mlp.fc.weight"), is_below("mlp", "mlp2.weight")
        (True, False)
    """
    above, _, _ = name.rpartition(".")
    return bool(above) and pattern(text).captures(above, is_below=True) is not None


def unwrapped(name: str) -> str:
    """A name without what wrappers put into it.

    Example:
        >>> unwrapped("_orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight")
        'layers.0.mlp.weight'
    """
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def nearest(text: str, names: Iterable[str]) -> str:
    """The names that look most like a pattern, for messages."""
    names = list(names)
    return ", ".join(get_close_matches(text, names, 3, 0.5) or names[:8]) or "(none)"


def starred(path: str) -> str:
    """A path with its numbers as ``*``.

    Example:
        >>> starred("model.layers.11.mlp")
        'model.layers.*.mlp'
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
