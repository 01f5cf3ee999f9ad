"""From a plan and the model that it is for to a tiny model, and the same plan for that one and for few ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

from harness.tiny.family import Family, family_of, refuse_other_names
from harness.tiny.names import unnumbered
from harness.tiny.sizes import Sizes
from harness.tiny.world import small_plan, smaller_axes
from shardtensor.errors import SpecError
from shardtensor.parallel.model_info import model_info
from shardtensor.plan.findings.checking import check_plan
from shardtensor.plan.line import Line
from shardtensor.plan.match.resolve import resolve
from shardtensor.plan.models.model import Model
from shardtensor.plan.plan import Plan
from shardtensor.plan.resolved import Resolved
from shardtensor.plan.text.reading import read_plan
from shardtensor.spec.nodes import Spec
from shardtensor.spec.parse import parse_spec

LARGE = 1 << 22
"""Elements of a model that is not tiny any more: every rank makes one."""

_OF_SIZES = {"E105", "E106", "E107", "E205", "E206", "E207", "E208"}
"""What may be wrong with a plan because sizes are small."""

_NUMBERS = re.compile(r"\d+|\{\d+(,\d+)*\}")


@attrs.frozen(eq=False)
class Tiny:
    """A tiny model, and the plan for it.

    Attributes:
        plan: for `config` and few ranks; devices that it names are the CPU.
        family: of the model.
        make: gives the model.
        config: of the model.
        said: what it is, in words, beside the real one.
    """

    plan: Plan
    family: Family
    make: Callable[[], nn.Module]
    config: Mapping[str, Any]
    said: str


def tiny_model(path: Any, resolved: Resolved, params: Mapping[str, Any]) -> Tiny:
    """Make what one training step can be run of: a tiny model of the same names, and its plan on few ranks.

    Numbers of heads and of experts stay; widths and the vocabulary become small numbers with the remainders that they
    had, larger ones where the plan asks for more; two layers are left, or as many as the plan tells apart.

    Args:
        path: what the plan was read from.
        resolved: the plan and the real model; it has no errors.
        params: of the plan, as given.

    Raises:
        SpecError: E303, no tiny model has these names; E105, no small world has these axes; or no small sizes fit.
    """
    plan, model = resolved.plan, resolved.model
    family = family_of(model)
    small, values = small_plan(path, plan, params)
    fault = ""
    for sizes in _attempts(plan, small, model):
        keys = family.shrink(plan.config, model, sizes)
        config = {**plan.config, **keys}
        try:
            read = read_plan(path, config=config, world=small.world, params=values)
        except SpecError as error:
            fault = fault or str(error.findings[0].fault if error.findings else error)
            continue
        read = attrs.evolve(read, lines=tuple(map(_on_cpu, read.lines)))
        with torch.device("meta"):
            made = model_info(family.make(config, model))
        refuse_other_names(family, made, model)
        wrong = [each for each in check_plan(resolve(read, made)) if each.code in _OF_SIZES]
        if wrong:
            fault = fault or wrong[0].fault
        elif sum(tensor.numel for tensor in made.tensors) <= LARGE:
            said = _said(plan, read, family, keys)
            return Tiny(read, family, partial(family.make, config, model), config, said)
    raise SpecError(
        "--numeric: no tiny model has sizes that the plan takes",
        {"of the smallest": fault},
        "give --module PKG:FN; FN() makes a small one of the same names",
        code="E303",
    )


def _attempts(plan: Plan, small: Plan, model: Model) -> Iterator[Sizes]:
    """Sizes to be tried, smallest first. Layers are dealt over an axis as the real ones are only where two are not."""
    segments = {segment for line in plan.lines for segment in line.pattern.split(".") if _NUMBERS.fullmatch(segment)}
    named = max((int(number) for segment in segments for number in re.findall(r"\d+", segment)), default=0)
    counts = _layers(model)
    layers = min(max(2, named + 1), counts)
    for head in (2, 4, 8, 16, 32, 64, 128):
        yield Sizes(small.world, head, layers)
        yield Sizes(small.world, head, min(counts, counts % small.world + max(small.world, layers)))


def _layers(model: Model) -> int:
    """Of a model: the most numbers that stand in one place of its names, experts aside."""
    numbers: dict[str, set[int]] = {}
    for tensor in model.tensors:
        found = re.search(r"(?:^|\.)(\d+)(?=\.|$)", tensor.name)
        if found:
            numbers.setdefault(unnumbered(tensor.name), set()).add(int(found[1]))
    return max((len(each) for each in numbers.values()), default=1)


def _on_cpu(line: Line) -> Line:
    """A line whose devices are the CPU: the step runs in one process."""
    if line.kind != "tensor" or isinstance(line.value, Spec) or "/" not in str(line.value):
        return line
    return attrs.evolve(line, value=parse_spec(re.sub(r'/\w+(:[\d-]+)?"', '/cpu"', str(line.value))))


def _said(plan: Plan, small: Plan, family: Family, keys: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{key} {value}" for key, value in keys.items())
    if plan.world == small.world:
        return f"a tiny {family.name} ({sizes}) on {small.world} ranks {small.axes.mesh}"
    said = f"a tiny {family.name} ({sizes}) on {small.world} ranks {small.axes.mesh} in place of {plan.world:,} "
    others = [f"{name}={size}" for name, size in smaller_axes(plan, small)]
    are = "is" if len(others) == 1 else "are"
    return f"{said}{plan.axes.mesh}" + (f"; {', '.join(others)} {are} more than is run here" if others else "")
