"""What a plan says of modules beside their flows, in the words of the torch side: attributes that count, hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from shardtensor.comm.group import Group
from shardtensor.plan.line import Hook
from shardtensor.plan.resolved import Passing
from shardtensor.sharding.counts import Count, count
from shardtensor.spec.nodes import Spec

Passings = Mapping[str, Passing]
"""By the path of the module."""


def _as_it_is(spec: Spec) -> Spec:
    return spec


def counts_of(
    root: nn.Module, passings: Passings, group: Group, spelled: Callable[[Spec], Spec] = _as_it_is
) -> tuple[Count, ...]:
    """The attributes that become this rank's share; of a module under two names once.

    Args:
        spelled: writes a spec in the axes of the mesh.

    Raises:
        PlanError, LayoutError: an attribute is missing, or cannot be cut so.
    """
    found: dict[tuple[int, str], Count] = {}
    for path, passing in passings.items():
        owner = root.get_submodule(path)
        for name, (spec, _) in passing.locals.items():
            found.setdefault((id(owner), name), count(path, owner, name, spelled(spec), group))
    return tuple(found.values())


def hooks_of(passings: Passings) -> tuple[tuple[str, Hook], ...]:
    """The calls of hooks, with the path of the module they stand in."""
    return tuple((path, hook) for path, passing in passings.items() for hook, _ in passing.uses)
