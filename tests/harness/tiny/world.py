"""A small world in which a plan does what it does in a large one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardtensor.errors import PlanError, SpecError
from shardtensor.plan.estimates.search import candidates
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import read_plan

MOST, FEW = 32, 16
"""Ranks that are run at most; and of a mesh that has to become another, where so many have all its axes."""


def small_plan(path: Any, plan: Plan, params: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan for a world that one process can run, and the parameters that it has there.

    Ranks whose samples differ become two or a few; all other axes stay as they are. Where that leaves too many ranks,
    the parameters that make the mesh become smaller, too.

    Args:
        path: what `plan` was read from.
        params: values of its parameters, as given.

    Raises:
        SpecError: E105, there is no such world.
    """
    alike = (found for w in divisors(plan.world) if w <= MOST and (found := _read(path, plan, w, params)))
    found = next((each for each in alike if _is_alike(plan, each)), None)
    if found is not None:
        return found, dict(params)
    others = list(_smaller(path, plan, params))
    if others:
        values, other = max(others, key=lambda each: _likeness(plan, each[1]))
        return other, values
    raise SpecError(
        f"--numeric: no world of at most {MOST} ranks has the axes of this plan",
        {"mesh": str(plan.axes.mesh)},
        "give a smaller --world, and values with --set",
        code="E105",
    )


def _smaller(path: Any, plan: Plan, params: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Plans for few ranks, with the parameters as given and with others of those that make the mesh; best first."""
    worlds = [w for w in divisors(plan.world) if 1 < w <= MOST]
    for world in sorted(worlds, key=lambda w: (w > FEW, w if w > FEW else -w)):
        tries = [dict(params)]
        try:
            for values in candidates(path, config=plan.config, world=world):
                sizes = {name: value for name, value in values.items() if not isinstance(value, bool)}
                tries.append({**params, **sizes})
        except (PlanError, SpecError):  # no parameter makes the mesh
            pass
        for i, values in enumerate(tries):
            other = _read(path, plan, world, values) if values not in tries[:i] else None
            if other is not None:
                yield values, other


def _read(path: Any, plan: Plan, world: int, params: Mapping[str, Any]) -> Plan | None:
    try:
        return read_plan(path, config=plan.config, world=world, params=params)
    except SpecError:
        return None


def _is_alike(plan: Plan, other: Plan) -> bool:
    """Whether axes have the sizes that they had, but those of samples, of which two ranks are enough."""
    data = plan.axes.leaves(plan.axes.data)
    return plan.axes.mesh.names == other.axes.mesh.names and all(
        size == was or (name in data and size > 1)
        for (name, was), size in zip(plan.axes.mesh.axes, other.axes.mesh.sizes, strict=True)
    )


def _likeness(plan: Plan, other: Plan) -> tuple[int, int]:
    """How many axes along which ranks differ are still such ones, and how many are no larger than they were."""
    sizes = dict(other.axes.mesh.axes)
    kept = sum(size > 1 and sizes.get(name, 1) > 1 for name, size in plan.axes.mesh.axes)
    return kept, sum(sizes.get(name, 1) <= size for name, size in plan.axes.mesh.axes)


def smaller_axes(plan: Plan, other: Plan) -> list[tuple[str, int]]:
    """The axes, with their sizes, that have fewer ranks in another plan; those of samples do the same with two."""
    data, sizes = plan.axes.leaves(plan.axes.data), dict(other.axes.mesh.axes)
    return [
        (name, size) for name, size in plan.axes.mesh.axes
        if sizes.get(name, 1) < (min(size, 2) if name in data else size)
    ]  # fmt: skip


def divisors(size: int) -> list[int]:
    """Of a number, smallest first."""
    small = [n for n in range(1, int(size**0.5) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})
