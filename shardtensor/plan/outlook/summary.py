"""What a plan without errors comes to: layouts, bytes of a rank, process groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from shardtensor.plan.match.units import own_tensors
from shardtensor.plan.outlook.memory import plan_bytes
from shardtensor.plan.resolved import Placed, Resolved
from shardtensor.spec.nodes import Spec

OPTIMIZER = "adamw"


@attrs.frozen
class LayoutShare:
    """The tensors of one layout.

    Attributes:
        layout: as the plan writes it, by position, and what `store` keeps of it.
        tensors: how many there are.
        bytes: of all of them, whole.
    """

    layout: str
    tensors: int
    bytes: int


@attrs.frozen
class ProcessGroups:
    """One set of process groups: ranks that differ along some axes."""

    axes: str
    ranks: int
    groups: int


@attrs.frozen(eq=False)
class Summary:
    """Of a plan for one model and world.

    Attributes:
        plan, model, mesh: as messages call them.
        tensors: how many, tied ones once.
        parameters: their elements, buffers left out.
        layouts: the largest first.
        rank_bytes: parameters, gradients, optimizer and buffers: of the rank with the least and the one with the most.
        groups: the process groups that are made.
        fallbacks: where an ``else`` side was taken, and which.
    """

    plan: str
    model: str
    mesh: str
    world: int
    tensors: int
    parameters: int
    layouts: tuple[LayoutShare, ...]
    rank_bytes: Mapping[str, tuple[int, int]]
    groups: tuple[ProcessGroups, ...]
    fallbacks: tuple[tuple[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return attrs.asdict(self)


def summarize(resolved: Resolved, path: str | Path) -> Summary:
    """Sum up a plan without errors; `path` is what messages call it."""
    plan, own = resolved.plan, own_tensors(resolved)
    held = plan_bytes(resolved, optimizer=OPTIMIZER)
    fallbacks = {str(finding.origin): finding.fault for finding in resolved.findings if finding.code == "N001"}
    return Summary(
        str(path),
        resolved.model.source,
        str(plan.axes.mesh),
        plan.world,
        len(own),
        sum(placed.tensor.numel for placed in own if not placed.tensor.is_buffer),
        _layouts(own),
        {
            name: (getattr(held.least, name), getattr(held.most, name))
            for name in ("parameters", "gradients", "optimizer", "buffers")
        },
        _groups(resolved, own),
        tuple(fallbacks.items()),
    )


def _layouts(own: list[Placed]) -> tuple[LayoutShare, ...]:
    found: dict[str, list[int]] = {}
    for placed in own:
        count = found.setdefault(_layout_text(placed), [0, 0])
        count[0] += 1
        count[1] += placed.tensor.bytes
    shares = [LayoutShare(text, *counts) for text, counts in found.items()]
    return tuple(sorted(shares, key=lambda share: -share.bytes))


def _layout_text(placed: Placed) -> str:
    """A layout and what is kept of it, the coordinate of ``only`` left open so that all experts are one."""
    spec = placed.spec
    text = str(spec)
    if isinstance(spec, Spec) and spec.only_part is not None:
        text = text.replace(str(spec.only_part), f"only({spec.only_part.axis}, *)")
    return text if placed.stored is None else f"{text} {placed.stored}"


def _groups(resolved: Resolved, own: list[Placed]) -> tuple[ProcessGroups, ...]:
    axes = resolved.plan.axes
    found: dict[tuple[str, ...], tuple[str, ...]] = {}

    def use(*names: str) -> None:
        leaves = [leaf for leaf in axes.leaves(names) if axes.size(leaf) > 1]  # along others a group is its own
        if leaves:
            found.setdefault(tuple(sorted(leaves)), names)

    def use_spec(spec: Any) -> None:
        if isinstance(spec, Spec):
            for part in (*spec.dims, spec.flat_part, *spec.partial_parts):
                use(*(part.axes if part is not None and part is not ... else ()))

    for placed in own:
        use_spec(placed.spec)
        use(*(placed.stored.axes if placed.stored is not None else ()))
    for passing in resolved.modules.values():
        for flow, _ in (*passing.ins.values(), *passing.outs.values()):
            use_spec(flow.before)
            use_spec(flow.after)
            use(*flow.addends)
    use(*axes.data)
    groups = []
    for names in found.values():
        size = 1
        for name in names:
            size *= axes.size(name)
        if size > 1:
            groups.append(ProcessGroups("*".join(names), size, axes.mesh.size // size))
    return tuple(groups)
