"""Parts of values: which axes cut what, or leave addends; and who speaks of them, found by the modules around."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import attrs

from shardtensor.plan.flows.flow import partial_axes
from shardtensor.plan.flows.modules import Names, around, is_inside
from shardtensor.spec.nodes import Spec

Parts = frozenset[tuple[str, str]]
"""Axes along which ranks hold parts of a value, each with what it cuts: ``features``, or ``tokens`` of some dim."""


@attrs.define(eq=False)
class _Speakers:
    """A few of those that speak of some parts, and the places of the first and the last of all."""

    few: list[str]
    first: int
    last: int


class Index:
    """By each module, sets of what modules in it speak of: a few of those, and the places of the first and the last."""

    def __init__(self, places: Mapping[str, int], everywhere: Iterable[tuple[str, Parts]] = ()) -> None:
        self._places = places
        self._found: dict[str, dict[Parts, _Speakers]] = {}
        for path, parts in everywhere:
            self.add(path, parts)

    def add(self, path: str, parts: Parts, scope: str = "") -> None:
        """Register a module with those around it, up to the one that is its `scope`."""
        if parts:
            place = self._places.get(path, 0)
            for above in around(path):
                of_it = self._found.setdefault(above, {})
                found = of_it.get(parts)
                if found is None:
                    found = of_it[parts] = _Speakers([], place, place)
                if len(found.few) < 4 and path not in found.few:
                    found.few.append(path)
                found.first, found.last = min(found.first, place), max(found.last, place)
                if above == scope:
                    break

    def has(self, above: str, parts: Parts, besides: str, after: int = -1, before: int | None = None) -> bool:
        """Whether some module in `above`, not `besides` itself nor one around it, speaks of all these parts.

        Args:
            after, before: one that stands after this place, or before it, in the order of the model.
        """
        return any(
            parts <= key
            and found.last > after
            and (before is None or found.first < before)
            and any(path != besides and not is_inside(besides, path) for path in found.few)
            for key, found in self._found.get(above, {}).items()
        )


@lru_cache(maxsize=4096)
def features(axes: Names) -> Parts:
    return frozenset((axis, "features") for axis in axes)


@lru_cache(maxsize=4096)
def addends_in(spec: Spec) -> Parts:
    """The axes along which a value is an addend."""
    return frozenset((axis, "addends") for axis in partial_axes(spec))


def block_of(path: str) -> str:
    """The innermost module around a path, or itself, that is one of several alike: whose name is a number."""
    return next((each for each in (path, *around(path)) if each.rpartition(".")[2].isdecimal()), "\0")
