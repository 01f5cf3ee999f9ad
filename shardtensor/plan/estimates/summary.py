"""The summary of a plan without errors: layouts, bytes of a rank, process groups; as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardtensor.plan.estimates.memory import plan_bytes
from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.nodes import ShardingSpec, Spec

OPTIMIZER = "adamw"


def summarize(resolved: Resolved, path: str | Path) -> dict[str, Any]:
    """Return the summary of a plan without errors.

    Args:
        path: the name of the plan in messages.

    Returns:
        the names of the plan, the model and the mesh; the numbers of tensors, tied ones once, and of elements of
        parameters; the layouts, the largest first, each with the number of its tensors and their global bytes; the
        bytes of the emptiest and the fullest rank; the process groups; the places where an ``else`` side was taken.
    """
    plan, own = resolved.plan, own_tensors(resolved)
    held = plan_bytes(resolved, optimizer=OPTIMIZER)
    layouts: dict[str, list[int]] = {}
    for placed in own:
        count = layouts.setdefault(_layout_text(placed), [0, 0])
        count[0] += 1
        count[1] += placed.tensor.bytes
    return {
        "plan": str(path),
        "model": resolved.model.source,
        "mesh": str(plan.axes.mesh),
        "world": plan.world,
        "tensors": len(own),
        "parameters": sum(placed.tensor.numel for placed in own if not placed.tensor.is_buffer),
        "layouts": [
            {"layout": text, "tensors": tensors, "bytes": size}
            for text, (tensors, size) in sorted(layouts.items(), key=lambda item: -item[1][1])
        ],
        "rank_bytes": {
            name: (getattr(held.least, name), getattr(held.most, name))
            for name in ("parameters", "gradients", "optimizer", "buffers")
        },
        "groups": list(_groups(resolved, own)),
        "fallbacks": [*{str(each.origin): each.fault for each in resolved.findings if each.code == "N001"}.items()],
    }


def _layout_text(placed: Placed) -> str:
    """Return a layout and its store as text; ``only`` has ``*`` as its coordinate, so that all experts are one."""
    text, only = str(placed.spec), placed.spec.only_part if isinstance(placed.spec, Spec) else None
    if only is not None:
        text = text.replace(str(only), f"only({only.axis}, *)")
    return text if placed.stored is None else f"{text} {placed.stored}"


def _groups(resolved: Resolved, own: list[Placed]) -> Iterator[dict[str, Any]]:
    """Yield the sets of process groups: those of ranks that differ along some axes."""
    axes = resolved.plan.axes
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for names in (*_axes_used(resolved, own), axes.data):
        leaves = [leaf for leaf in axes.leaves(names) if axes.size(leaf) > 1]  # along other axes a group has one rank
        if leaves:
            found.setdefault(tuple(sorted(leaves)), names)
    for names in found.values():
        size = 1
        for name in names:
            size *= axes.size(name)
        yield {"axes": "*".join(names), "ranks": size, "groups": axes.mesh.size // size}


def _axes_used(resolved: Resolved, own: list[Placed]) -> Iterator[tuple[str, ...]]:
    """Yield the axes that appear together in layouts, stores and flows."""

    def of(spec: ShardingSpec) -> Iterator[tuple[str, ...]]:
        for part in (*spec.dims, spec.flat_part, *spec.partial_parts) if isinstance(spec, Spec) else ():
            yield part.axes if part is not None and part is not ... else ()

    for placed in own:
        yield from of(placed.spec)
        yield placed.stored.axes if placed.stored is not None else ()
    for module_flows in resolved.modules.values():
        for flow, _ in (*module_flows.ins.values(), *module_flows.outs.values()):
            yield from of(flow.before)
            yield from of(flow.after)
            yield flow.partials
