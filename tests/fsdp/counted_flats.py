"""Counts what the units of a model send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardtensor.fsdp.flat import Flat
from shardtensor.fsdp.unit import units_in


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[str]]:
    """Count a model's flats that are sent: gathered from all ranks, reduced, and summed over copies."""
    counts: Counter[str] = Counter()
    flats: list[Flat] = [flat for _, unit in units_in(model) for flat in unit.flats]

    def told(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    def told_of_sum(finish: Any) -> Any:
        def call(*args: Any) -> Any:
            scale = finish(*args)
            counts["sum over copies"] += scale is not None
            return scale

        return call

    for flat in flats:
        flat.present_range, flat.let_go = told("gather", flat.present_range), told("reduce", flat.let_go)
        if flat.carry.replicate is not None:
            flat.carry.finish = told_of_sum(flat.carry.finish)
    try:
        yield counts
    finally:
        for flat in flats:
            del flat.present_range, flat.let_go
            vars(flat.carry).pop("finish", None)
