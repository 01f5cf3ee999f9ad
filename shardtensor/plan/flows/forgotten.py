"""Modules that a plan forgot, with parameters whose gradient nobody knows, or that would meet values cut otherwise
(E401, E403)."""

from __future__ import annotations

from collections.abc import Container, Iterator

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.findings.places import pattern_place, style_note
from shardtensor.plan.flows.flow import cuts
from shardtensor.plan.flows.meetings import Meetings
from shardtensor.plan.flows.modules import Modules
from shardtensor.plan.line import Line


def forgotten(meetings: Meetings, to_hooks: Container[str] | None) -> Iterator[Finding]:
    """Parameters of modules of which nothing is said, that meet addends, streams, or cut values beside them.

    Args:
        to_hooks: modules whose result a hook takes, and no module; None where those beside others are not looked at.
    """
    modules = meetings.modules
    cut_beside = _cut_beside(meetings, to_hooks) if to_hooks is not None else {}
    for path, params in modules.owned.items():
        stated = modules.stated.get(path)
        copied = [p for p in params.values() if p.layout.is_replicated and p.tensor.requires_grad]
        if stated is not None and (stated.ins or stated.outs):
            continue
        if any(not placed.layout.is_replicated for placed in params.values()):
            yield from _cut(path, meetings, to_hooks is not None)
            continue
        if not copied:
            continue
        around_it = modules.nearest_in(path)
        addends = meetings.addends.get(around_it, ()) if around_it is not None else ()
        parent = path.rpartition(".")[0] if path else None
        beside = cut_beside.get(parent, {}) if parent is not None else {}
        gathered = meetings.gathers(path)
        streams = [axis for axis in meetings.streams if axis not in gathered]
        if addends:
            axes = addends
            why = f"the `in` of {around_it or 'the module'} sums what comes back along {modules.named(axes)}, for "
            why += f"{meetings.served[around_it or ''][0].path} is cut: the gradients here may be addends, or copies"
        elif beside:
            axis, other = next(iter(beside.items()))
            axes = tuple(beside)
            why = f"{other} beside it leaves values cut along {modules.named((axis,))}: met by such values, its "
            why += "gradients are addends; met by copies, they are copies"
        elif streams:
            axes = tuple(streams)
            other = meetings.streams[streams[0]]
            why = f"{other} leaves values cut along {modules.named(axes)}: if it meets such values, its gradients "
            why += "are addends, and one rank's would be taken for the sum"
        else:
            continue
        shown = modules.named(axes)
        quote = "" if modules.resolved.plan.sources else '"'  # rules in Python
        cut, whole = (f"along({quote}{stream}{quote})" for stream in (f"[-, {shown}, ...]", "replicate"))
        fix = f"write `{cut}` if values come cut so, `{whole}` if they come whole"
        if addends:
            fix += "; or move `in` to the modules that are cut, so that this one is not inside"
        name = copied[0].tensor.name
        yield Finding(
            "E401", f"the gradient of `{name}` along {shown} is not known", _place(copied[0].line, modules),
            why, fix,
            (), name,
        )  # fmt: skip


def _cut(path: str, meetings: Meetings, is_whole: bool) -> Iterator[Finding]:
    """A cut module of which nothing is said, so that it takes and gives ShardedTensors, where plain values pass."""
    modules, stated = meetings.modules, meetings.modules.stated.get(path)
    layer, around_it, gathered = modules.layers.get(path), modules.nearest_in(path), meetings.gathers(path)
    addends = meetings.addends.get(around_it, ()) if around_it is not None and layer is None else ()
    streams = [axis for axis in meetings.streams if axis not in gathered]
    if is_whole and layer is not None and layer.kind.name == "linear":
        streams = []  # it is told with streams
    if not (addends or streams) or (stated is not None and stated.passing.uses):
        return
    placed = next(p for p in modules.owned[path].values() if not p.layout.is_replicated)
    origin = placed.line.origin if placed.line is not None else None
    why = f"{placed.tensor.name} is `{placed.spec}`, so it takes and gives ShardedTensors; "
    if addends:
        why += f"their gradients are complete, and the `in` of {around_it or 'the module'} sums what comes back along "
        why += f"{modules.named(addends)}: they would be counted {modules.times(addends)} times"
    else:
        why += f"{meetings.streams[streams[0]]} leaves plain values cut along {modules.named(streams)}, and it would "
        why += "take a part for the whole, or leave a whole among parts"
    yield Finding(
        "E401" if addends else "E403", f"`{path}` is cut, and the plan does not say how values pass it", origin, why,
        "say it: `in` and `out` in its block, or a style such as `colwise(...)` or `vocab_embedding(...)`",
        style_note(origin, "layout"), path,
    )  # fmt: skip


def _cut_beside(meetings: Meetings, to_hooks: Container[str]) -> dict[str, dict[str, str]]:
    """By each module, the axes along which one directly in it leaves values cut, and which one."""
    found: dict[str, dict[str, str]] = {}
    for path, stated in meetings.modules.stated.items():
        if not path or path in to_hooks:
            continue
        outside = set(meetings.streams) - meetings.gathers(path)  # where every forgotten parameter is told already
        for flow in stated.outs.values():
            for dim, cut in cuts(flow.after).items():
                for axis in cut.axes:
                    if dim == -1 or axis not in outside:
                        found.setdefault(path.rpartition(".")[0], {}).setdefault(axis, path)
    return found


def _place(line: Line | None, modules: Modules) -> Origin | None:
    if line is not None:
        return pattern_place(line)
    unmatched = modules.resolved.plan.unmatched
    return unmatched.origin if unmatched is not None else None
