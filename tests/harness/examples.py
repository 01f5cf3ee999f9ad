"""How many examples hypothesis draws: few and always the same in the quick run, many and new ones in the full run."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from harness import FULL

QUICK_SHARE = 10
settings.register_profile("quick", max_examples=100 // QUICK_SHARE, deadline=None, derandomize=True, database=None)
settings.register_profile("full", max_examples=100, deadline=None)
settings.load_profile("full" if FULL else "quick")


def examples(most: int) -> Any:
    """Decorate a test with the number of examples of a full run, of which the quick run draws a tenth, 8 at least."""
    return settings(max_examples=most if FULL else max(8, most // QUICK_SHARE), deadline=None)
