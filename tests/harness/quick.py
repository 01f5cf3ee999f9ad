"""The quick run: of a test with many parameters a sample, always the same. SHARDTENSOR_TEST_FULL=1 runs all of them.

* A test of every world size runs in one of two to four ranks, which other parameters take in turns; some in one, too.
* A test of simulated and of real ranks runs on real ones once, with the parameters that its name falls upon.
* A test that would take longer than `MOST_S` in all runs with as many of its parameters as take that long, evenly
  spread; with one at least. ``tests/seconds.txt`` says how long each takes.
* `sampled` draws from the cases inside a test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar
from zlib import crc32

import pytest

from harness import FULL
from harness.progress import bare_name, recorded_seconds

MOST_S = 0.8

T = TypeVar("T")


def sampled(values: Iterable[T], most: int) -> list[T]:
    """Of more than `most` values that many, evenly spread, the first among them; all in a full run."""
    values = list(values)
    return values if FULL else _spread(values, most)


def _spread(values: list[T], most: int) -> list[T]:
    if len(values) <= most:
        return values
    return [values[place * len(values) // most] for place in range(most)]


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """What a quick run leaves out."""
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[bare_name(item.nodeid)].append(item)
    seconds = recorded_seconds()
    out: set[pytest.Item] = set()
    for name, made in tests.items():
        mark = crc32(name.encode())
        kept = _some_sizes(made, mark)
        kept = _real_ranks_once(kept, mark)
        if name in seconds:
            kept = _spread(kept, max(1, round(MOST_S / seconds[name])))
        out |= set(made) - set(kept)
    return out


def _some_sizes(items: list[Any], mark: int) -> list[Any]:
    sizes = sorted({item.callspec.params["size"] for item in items if "size" in item.callspec.params})
    if len(sizes) < 3:
        return items
    turns = [size for size in sizes if size > 1]
    places: dict[Any, int] = {}
    kept = []
    for item in items:
        params = item.callspec.params.items()
        others = tuple((name, repr(value)) for name, value in params if name not in ("size", "world"))
        place = mark + places.setdefault(others, len(places))
        size = item.callspec.params["size"]
        if size == turns[place % len(turns)] or (size == 1 and place % 4 == 0):
            kept.append(item)
    return kept


def _real_ranks_once(items: list[Any], mark: int) -> list[Any]:
    real = [item for item in items if item.callspec.params.get("world") == "gloo"]
    if len(real) < 2 or len(real) == len(items):
        return items
    once = real[mark % len(real)]
    return [item for item in items if item is once or item not in real]
