"""How values pass experts: ``use dispatch(ep)`` on stacked tensors, whose arithmetic is known (E401, E402, E403)."""

from __future__ import annotations

from collections.abc import Iterator

from shardtensor.layout.layout import CutLayout
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import Flow, as_written, partial_axes
from shardtensor.plan.flows.modules import Modules, Names, Stated, flow_finding, is_inside
from shardtensor.plan.line import Line
from shardtensor.plan.resolved import Placed

TOKENS, WEIGHTS = "", "top_k_weights"
"""The arguments of stacked experts whose gradients are addends where an expert is cut inside."""


def expert_findings(modules: Modules, is_whole: bool = True) -> Iterator[Finding]:
    """What is wrong with the experts of a plan.

    Args:
        is_whole: the plan says along which axes samples differ.
    """
    for path, stated in modules.stated.items():
        own = modules.owned.get(path, {})
        is_stacked = any(len(placed.tensor.shape) > 2 for placed in own.values())
        for hook, line in stated.passing.uses:
            if hook.name == "dispatch" and hook.args:
                names = (hook.args[0],) if isinstance(hook.args[0], str) else tuple(hook.args[0])
                axes = modules.leaves(name for said in names for name in said.split("*"))
                experts = f"{path}.experts".lstrip(".")
                if axes and is_whole and (is_stacked or any(is_inside(other, experts) for other in modules.owned)):
                    yield from _same_samples(path, axes, line, modules)
                if axes and is_stacked:
                    yield from _stacked(path, axes, modules)
        if path in modules.layers or not (stated.ins or stated.outs) or stated.passing.uses:
            continue
        for name, placed in own.items():
            shown = modules.named(axis for axis in _cut(placed, modules) if axis in modules.data)
            if shown:
                yield flow_finding(
                    "E403", f"`{name}` is cut along {shown}, and no token is sent there", placed.line,
                    f"ranks along {shown} have other samples and other parts of `{placed.spec}`: each sample meets one "
                    "part alone",
                    f"write `use dispatch({shown}, top_k=...)` in the block of `{path}`, or a hook of your own", path,
                )  # fmt: skip
                break


def _cut(placed: Placed, modules: Modules) -> Names:
    """The axes over which a parameter is cut, those of one rank left out, as they are of flows."""
    layout = placed.layout
    if not isinstance(layout, CutLayout) or len(layout.grid) != len(modules.axes.mesh.axes):
        return ()
    sizes = enumerate(modules.axes.mesh.axes)
    return tuple(name for i, (name, size) in sizes if i in layout.parting_axes and size > 1)


def _stacked(path: str, dealt: Names, modules: Modules) -> Iterator[Finding]:
    """Flows of experts that are cut inside, each making addends of its result and of its inputs' gradients."""
    stated, params = modules.stated[path], modules.owned[path]
    inside: dict[str, str] = {}
    for name, placed in params.items():
        inside = dict.fromkeys(_cut(placed, modules), name) | inside
    axes = tuple(a for a in modules.axes.mesh.names if a in inside and a not in dealt and a not in modules.data)
    if not axes or modules.axes.mesh.size == 1:
        return
    shown = modules.named(axes)
    placed = params[inside[axes[0]]]
    why = f"`{inside[axes[0]]}` is `{placed.spec}`: a rank has a part of each expert along {shown}"
    out = stated.out
    if out is None or not set(axes) <= set(partial_axes(out.before)):
        line = stated.line("out") if out is not None else placed.line
        said = f"`out: {as_written(stated.passing.outs[''][0])}`" if out is not None else "no `out`"
        yield flow_finding(
            "E402", f"{said} for experts that leave addends along {shown}", line,
            f"{why}, so what it makes is an addend until it is summed",
            f"write `out: partial({shown}) -> {as_written(out.after) if out is not None else 'replicate'}`", path,
        )  # fmt: skip
    for name in (TOKENS, WEIGHTS):
        flow = _entering(stated, name)
        if flow is not None and ((flow.says_grad and not flow.addends) or set(axes) <= set(flow.addends)):
            continue
        side = f"in {name}".strip()
        came = as_written(stated.passing.ins[name][0].before) if flow is not None else "replicate"
        what = f"`{side}` is not said" if flow is None else f"`{side}: {came}` does not sum its gradient"
        yield flow_finding(
            "E401", f"{what}, and it is an addend along {shown}", stated.line("in", name) or placed.line,
            f"{why}, and multiplies what enters with it: one rank's gradient would be taken for the sum",
            f"write `{side}: {came} grad partial({shown})`", path,
        )  # fmt: skip


def _entering(stated: Stated, name: str) -> Flow | None:
    return stated.ins.get(name) or (stated.ins.get("hidden_states") if not name else None)


def _same_samples(path: str, dealt: Names, line: Line, modules: Modules) -> Iterator[Finding]:
    """Tokens sent along axes on which all ranks have the same ones."""
    axes = [axis for axis in dealt if axis not in modules.data]
    if axes:
        shown, data = modules.named(axes), modules.axes.data
        yield flow_finding(
            "E401", f"tokens are sent along {shown}, and samples do not differ along it", line,
            f"every rank along {shown} sends the same tokens: the gradients of experts would be {modules.times(axes)} "
            f"times too large; the data axes are {', '.join(data) or 'none'}",
            f"write `data {'*'.join([*data, shown])}`", path,
        )  # fmt: skip
