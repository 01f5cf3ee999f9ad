"""Patterns of dotted names: ``layers.*.mlp.{gate,up}_proj.weight``.

``*`` stands for any characters of one segment, ``**`` for any number of whole segments, ``{a,b}`` for one of those
listed; anything else for itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Segments that wrappers put into names; patterns do not see them."""


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = []
    for segment in pattern.split("."):
        if segment == "**":
            parts.append(r"(?:[^.]+\.)*")
            continue
        text = re.escape(segment).replace(r"\*", "[^.]*")
        text = re.sub(r"\\\{(.*?)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", text)
        parts.append(text + r"\.")
    return re.compile("".join(parts))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern stands for a dotted name.

    Example:
        >>> matches("layers.*.{q,k}.weight", "layers.3.q.weight"), matches("**.bias", "bias"), matches("a.*", "a.b.c")
        (True, True, False)
    """
    return _compiled(pattern).fullmatch(f"{name}.") is not None


def is_below(pattern: str, name: str) -> bool:
    """Whether a name lies below a module that the pattern stands for.

    Example:
        >>> is_below("mlp", "mlp.fc.weight"), is_below("mlp", "mlp2.weight")
        (True, False)
    """
    segments = name.split(".")
    return any(matches(pattern, ".".join(segments[:i])) for i in range(1, len(segments)))


def unwrapped(name: str) -> str:
    """A name without what wrappers put into it.

    Example:
        >>> unwrapped("_orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight")
        'layers.0.mlp.weight'
    """
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def nearest(pattern: str, names: Iterable[str]) -> str:
    """The names that look most like a pattern, for messages."""
    names = list(names)
    return ", ".join(get_close_matches(pattern, names, 3, 0.5) or names[:8]) or "(none)"
