"""Search the meshes of a plan: the values of its parameters that fit into memory and give the shortest step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from shardtensor.cost.profile import Profile
from shardtensor.errors import PlanError, SpecError
from shardtensor.layout.explain import bytes_text
from shardtensor.plan.estimates.estimate import Batch, StepSeconds, TracedStep, data_ranks, step_seconds
from shardtensor.plan.estimates.memory import RankBytes, plan_bytes
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.text.reading import PlanReader, read_plan
from shardtensor.plan.text.scope import Scope
from shardtensor.plan.text.sources import Files


@attrs.frozen(eq=False)
class Choice:
    """One mesh, and the costs of a plan on it.

    Attributes:
        params: the values of the parameters that were searched.
        mesh: as text.
        fault: why it is refused: a requirement, an error of the plan, memory; empty for one that passes.
        held: of the rank that holds the most; None if a fault was found before.
        activation_bytes: that autograd saves; 0 if no step was counted.
        seconds: of a step; None if it does not pass, or no step was counted.
    """

    params: Mapping[str, int | bool]
    mesh: str = ""
    fault: str = ""
    held: RankBytes | None = None
    activation_bytes: int = 0
    seconds: StepSeconds | None = None

    @property
    def bytes(self) -> int:
        """The bytes that the fullest rank needs in a step."""
        return 0 if self.held is None else self.held.total + self.activation_bytes


def search(
    path: str | Path,
    model: Model,
    *,
    config: Mapping[str, Any],
    world: int,
    memory_bytes: int,
    batch: Batch,
    profile: Profile,
    params: Mapping[str, Any] = {},
    optimizer: str = "adamw",
    master_weights: bool = False,
    trace: Callable[[Plan, int, int], TracedStep] | None = None,
) -> tuple[Choice, ...]:
    """Return the meshes of a plan, sorted by the estimated seconds of a step, or by the bytes of a rank if no step is
    counted. Those that do not pass are last, with the reason.

    For parameters that change the mesh it tries the divisors of the world whose product divides it, and for booleans
    both values. Only meshes that fit into memory are traced.

    Args:
        path: of the plan, or its text.
        memory_bytes: of a rank.
        params: values that are fixed.
        optimizer, master_weights: as for `rank_bytes`.
        trace: counts a step of a plan, given the samples of a data rank and the tokens of a sample.

    Raises:
        PlanError: the plan has no parameter that changes the mesh.
    """
    found = []
    for values in candidates(path, config=config, world=world, params=params):
        plan = _read(path, config, world, {**params, **values})
        if isinstance(plan, str):
            found.append(Choice(values, fault=plan))
            continue
        resolved, choice = resolve(plan, model), Choice(values, str(plan.axes.mesh))
        if resolved.errors:
            choice = attrs.evolve(choice, fault=f"{resolved.errors[0].code}: {resolved.errors[0].fault}")
        elif batch.samples % data_ranks(resolved):
            fault = f"{batch.samples} samples cannot be dealt to {data_ranks(resolved)} data ranks"
            choice = attrs.evolve(choice, fault=fault)
        else:
            held = plan_bytes(resolved, optimizer=optimizer, master_weights=master_weights).most
            choice = _fitting(attrs.evolve(choice, held=held), memory_bytes)
            if trace is not None and not choice.fault:
                step = trace(plan, batch.samples // data_ranks(resolved), batch.seq)
                choice = _fitting(attrs.evolve(choice, activation_bytes=step.activation_bytes), memory_bytes)
                spent = step_seconds(resolved, step, profile, batch.dtype, held)
                choice = choice if choice.fault else attrs.evolve(choice, seconds=spent)
        found.append(choice)
    return tuple(sorted(found, key=lambda c: (bool(c.fault), c.seconds.total if c.seconds else 0.0, c.bytes)))


def _fitting(choice: Choice, memory_bytes: int) -> Choice:
    if choice.bytes <= memory_bytes:
        return choice
    return attrs.evolve(choice, fault=f"needs {bytes_text(choice.bytes)} of {bytes_text(memory_bytes)}")


def candidates(
    path: str | Path, *, config: Mapping[str, Any], world: int, params: Mapping[str, Any] = {}
) -> tuple[dict[str, int | bool], ...]:
    """Return the values of parameters that `search` tries.

    Raises:
        PlanError: the plan has no parameter that changes its mesh.
    """
    found = _tried(path, config, world, params)
    if not found:
        names = _params(_head(path, config, world, params))
        raise PlanError(
            "the plan has no parameter that changes its mesh",
            {"parameters": ", ".join(names) or "none"},
            "write `param tp = 8` and use it in `mesh`; values given by --set stay as they are",
        )
    return found


def _tried(
    path: str | Path, config: Mapping[str, Any], world: int, params: Mapping[str, Any]
) -> tuple[dict[str, int | bool], ...]:
    head = _head(path, config, world, params)
    free = {name: value for name, value in _params(head).items() if name not in params}
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    # The numeric parameters that change the mesh, or with which it does not fit the world.
    names = [
        name for name, value in free.items()
        if type(value) is not bool and len({_mesh(head.again({**head.given, name: n})) for n in divisors}) > 1
    ]  # fmt: skip
    switches = [name for name, value in free.items() if type(value) is bool]
    return tuple(
        dict(zip((*names, *switches), (*values, *flags), strict=True))
        for values in product(divisors, repeat=len(names)) if names and world % math.prod(values) == 0
        for flags in product((False, True), repeat=len(switches))
    )  # fmt: skip


def readable_plan(path: str | Path, *, config: Mapping[str, Any], world: int, params: Mapping[str, Any] = {}) -> Plan:
    """Return the plan with its default values or, if those do not fit, with the first of `candidates` that fits.

    Raises:
        SpecError: none fits; the error is that of the default values.
    """
    try:
        return read_plan(path, config=config, world=world, params=params)
    except SpecError as error:
        plans = (_read(path, config, world, {**params, **values}) for values in _tried(path, config, world, params))
        found = next((plan for plan in plans if isinstance(plan, Plan)), None)
        if found is None:
            raise error
        return found


def _head(path: str | Path, config: Mapping[str, Any], world: int, params: Mapping[str, Any]) -> PlanReader:
    """Return a reader with the numbers of a plan, whether or not they fit."""
    files = Files()
    reader = PlanReader(files, Scope(config, world, "config.json"), dict(params), only_head=True)
    reader.read(files.main(path))
    return reader


def _params(head: PlanReader) -> dict[str, Any]:
    return {name: binding.value for name, binding in head.scope.names.items() if binding.is_param}


def _mesh(head: PlanReader) -> str:
    if any(finding.code in ("E105", "E107") for finding in head.findings):
        return ""
    return "" if head.axes is None else str(head.axes.mesh)


def _read(path: str | Path, config: Mapping[str, Any], world: int, params: Mapping[str, Any]) -> Plan | str:
    """Return the plan with these values, or the text of its first error."""
    try:
        return read_plan(path, config=config, world=world, params=params)
    except SpecError as error:
        faults = [finding for finding in error.findings if finding.severity == "error"]
        return f"{faults[0].code}: {faults[0].fault}" if faults else str(error).splitlines()[0]
