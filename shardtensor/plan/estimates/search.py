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
    reader = PlanReader(files := Files(), Scope(config, world, "config.json"), dict(params))
    reader.read(files.main(path))  # whether or not its values fit
    free = {n: b.value for n, b in reader.scope.names.items() if b.is_param and n not in params}
    names = [name for name, value in free.items() if name in reader.mesh_params and type(value) is not bool]
    switches = [name for name, value in free.items() if type(value) is bool]
    if not names:
        raise PlanError(
            "the plan has no parameter that changes its mesh",
            {"parameters": ", ".join(name for name, b in reader.scope.names.items() if b.is_param) or "none"},
            "write `param tp = 8` and use it in `mesh`; values given by --set stay as they are",
        )
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return tuple(
        dict(zip((*names, *switches), (*values, *flags), strict=True))
        for values in product(divisors, repeat=len(names)) if world % math.prod(values) == 0
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
        try:
            tried = candidates(path, config=config, world=world, params=params)
        except PlanError:
            raise error from None
        plans = (_read(path, config, world, {**params, **values}) for values in tried)
        found = next((plan for plan in plans if isinstance(plan, Plan)), None)
        if found is None:
            raise error
        return found


def _read(path: str | Path, config: Mapping[str, Any], world: int, params: Mapping[str, Any]) -> Plan | str:
    """Return the plan with these values, or the text of its first error."""
    try:
        return read_plan(path, config=config, world=world, params=params)
    except SpecError as error:
        faults = [finding for finding in error.findings if finding.severity == "error"]
        return f"{faults[0].code}: {faults[0].fault}" if faults else str(error).splitlines()[0]
