"""``dataclasses.replace``, ``fields`` and ``asdict`` of values that are dataclasses in torch and attrs classes here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import attrs

T = TypeVar("T", bound=type)


def with_dataclass_fields(*names: str) -> Callable[[T], T]:
    """Decorate an attrs class whose constructor takes `names`; all its attributes when none are given.

    Example:
        >>> from shardtensor.spec.devices import ChunkShardingSpec
        >>> str(dataclasses.replace(ChunkShardingSpec(0, "rank:0-1/cpu"), dim=1))
        'chunk(dim=1, placements=["rank:0-1/cpu"])'
    """

    def decorate(kind: T) -> T:
        found = names or [attribute.name for attribute in attrs.fields(kind)]
        twin = dataclasses.make_dataclass(kind.__name__, found, init=False, repr=False, eq=False)
        kind.__dataclass_fields__ = twin.__dataclass_fields__  # type: ignore[attr-defined]
        kind.__dataclass_params__ = twin.__dataclass_params__  # type: ignore[attr-defined]
        return kind

    return decorate
