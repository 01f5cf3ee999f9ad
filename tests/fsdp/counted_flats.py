"""Counts what the units of a model send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.fsdp.state import states_in


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[str]]:
    """Count a model's flats that are sent: gathered from all ranks, reduced, and summed over copies."""
    counts: Counter[str] = Counter()
    flats: list[ParamGroup] = [flat for _, unit in states_in(model) for flat in unit.param_groups]

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
        flat.present_range, flat.take_held = told("gather", flat.present_range), told("reduce", flat.take_held)
        if flat.accumulated.replicate is not None:
            flat.accumulated.finish = told_of_sum(flat.accumulated.finish)
    try:
        yield counts
    finally:
        for flat in flats:
            del flat.present_range, flat.take_held
            vars(flat.accumulated).pop("finish", None)
