"""Counts what the modules of a model send."""

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
    """Count a model's parameter groups that are gathered from all ranks, reduced, and summed over replicas."""
    counts: Counter[str] = Counter()
    groups: list[ParamGroup] = [group for _, state in states_in(model) for group in state.param_groups]

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            counts[name] += result is not False  # a sum that waits for a later backward
            return result

        return call

    for group in groups:
        group.gather, group.gradients.pack = counting("gather", group.gather), counting("reduce", group.gradients.pack)
        group.gradients._sum_over = counting("sum over copies", group.gradients._sum_over)
    try:
        yield counts
    finally:
        for group in groups:
            del group.gather, group.gradients.pack, group.gradients._sum_over
