"""``experts.<ep>.w1``: the numbers in names are a dim, dealt in order and evenly over an axis."""

from __future__ import annotations

from collections.abc import Mapping

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.places import segment_place
from shardtensor.plan.line import Line
from shardtensor.plan.match.misfit import axes_text
from shardtensor.plan.match.patterns import Number, pattern
from shardtensor.plan.plan import Plan
from shardtensor.spec.diagnostics import nearest


def deal(line: Line, names: tuple[str, ...], plan: Plan) -> tuple[Mapping[str, tuple[str, int]], Finding | None]:
    """Return the axis and the coordinate at which each name of a line lives; none for lines that deal nothing.

    Numbers are dealt among names that differ in nothing else, so each layer deals its own experts.
    """
    if "<" not in line.pattern:
        return {}, None
    read = pattern(line.pattern)
    at = [i for i, part in enumerate(read.wildcards) if isinstance(part, Number)]
    if not at:
        return {}, None
    number = read.wildcards[at[0]]
    assert isinstance(number, Number)
    axis, axes = number.axis, plan.axes
    place = segment_place(line, f"<{axis}>")
    if len(at) > 1:
        return {}, Finding(
            "E204", f"`{line.pattern}` deals numbers over two axes", place,
            "a tensor lives at one coordinate of one axis", "keep one `<axis>` and write `*` for the other",
            
        )  # fmt: skip
    if axis not in axes.mesh.names:
        why = f"{axis} is made of {', '.join(axes.made_of[axis])}" if axis in axes.made_of else axes_text(plan)
        fix = nearest(axis, axes.mesh.names) or f"write one of {', '.join(axes.mesh.names)} between `<` and `>`"
        fault = f"no mesh axis that is not made of others is called `{axis}`"
        return {}, Finding("E201", fault, place, why, fix)
    groups: dict[tuple[str, ...], dict[int, list[str]]] = {}
    for name in names:
        values = read.captures(name, is_below=True)
        if values is not None:
            rest = values[: at[0]] + values[at[0] + 1 :]
            groups.setdefault(rest, {}).setdefault(int(values[at[0]]), []).append(name)
    size = axes.size(axis)
    dealt: dict[str, tuple[str, int]] = {}
    for numbers in groups.values():
        if len(numbers) % size:
            first = numbers[min(numbers)][0]
            fits = ", ".join(str(n) for n in range(1, len(numbers) + 1) if len(numbers) % n == 0)
            return {}, Finding(
                "E205", f"{len(numbers)} numbered modules cannot be dealt evenly over {axis}={size}", place,
                f"`<{axis}>` stands for {min(numbers)} to {max(numbers)}, first in {first}; "
                f"{len(numbers)} % {size} = {len(numbers) % size}",
                f"choose {axis} from {fits}",
            )  # fmt: skip
        per = len(numbers) // size
        for order, value in enumerate(sorted(numbers)):
            dealt |= dict.fromkeys(numbers[value], (axis, order // per))
    return dealt, None
