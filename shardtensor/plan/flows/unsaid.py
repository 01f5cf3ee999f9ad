"""Modules of which a plan does not say how values pass them, beside others of which it does (E401, E403)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import cached_property

from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.findings.places import origin_of, pattern_place, style_note
from shardtensor.plan.flows.flow import cut_axes, cuts, last_cut
from shardtensor.plan.flows.meetings import Meetings
from shardtensor.plan.flows.modules import Modules, Stated, around
from shardtensor.plan.line import Line


class Unsaid:
    """What is not said of modules.

    Args:
        to_hooks: modules whose result a hook takes, and no module.
    """

    def __init__(self, meetings: Meetings, to_hooks: Container[str]) -> None:
        self._meetings, self._modules, self._to_hooks = meetings, meetings.modules, to_hooks

    def findings(self, is_whole: bool = True) -> Iterator[Finding]:
        """E401 and E403.

        Args:
            is_whole: what is not said of a module can be told by what is said of others.
        """
        if is_whole:
            yield from self._among_plain_values()
            yield from self._of_another_width()
        yield from self._forgotten(is_whole)

    def _of_another_width(self) -> Iterator[Finding]:
        """Layers that an `in` would serve, but for their width: they take a value that is left cut inside (E403)."""
        modules = self._modules
        for path, layers in self._meetings.served.items():
            linear = [layer for layer in layers if layer.kind.name == "linear" and layer.is_cut]
            widths = {layer.width("in") for layer in linear}
            if len(widths) < 2:
                continue
            came = linear[0].width("in")
            for layer in linear:
                width = layer.width("in")
                others = self._widths.get(path, {}).get(width, [])
                flows = [(other, flow) for other in others if (flow := modules.stated.get(other, Stated()).out)]
                if width == came or not flows or not all(last_cut(flow.after) for _, flow in flows):
                    continue
                other, flow = flows[0]
                line = layer.stated.line("out") or layer.params["weight"].line
                yield Finding(
                    "E403", f"`{layer.path}` takes whole values, and `{other}` leaves them cut", origin_of(line),
                    f"it multiplies all {width} elements of its input, and each rank has a part of them: "
                    f"`{modules.stated[other].passing.outs[''][0]}`",
                    f"cut it along its inputs: `rowwise({modules.named(cut_axes(flow.after))})`",
                    style_note(origin_of(line), "flow"), layer.path,
                )  # fmt: skip

    @cached_property
    def _widths(self) -> dict[str, dict[int, list[str]]]:
        """By each module and width, the layers in it that leave values of this width."""
        found: dict[str, dict[int, list[str]]] = {}
        for path, layer in self._modules.layers.items():
            if layer.kind.name == "linear" and path not in self._meetings.broken:
                for above in around(path):
                    found.setdefault(above, {}).setdefault(layer.width("out"), []).append(path)
        return found

    def _among_plain_values(self) -> Iterator[Finding]:
        """Norms and tables that are cut and give ShardedTensors, in one of several modules alike where plain values
        pass (E403). Products may: a pair of them gives whole values again."""
        modules = self._modules
        told = {
            layer.path
            for path, layers in self._meetings.served.items()
            if self._meetings.addends.get(path)
            for layer in layers
        }
        products = {
            above for path, layer in modules.layers.items()
            if layer.kind.name == "linear" and layer.is_cut and not layer.has_flow for above in around(path)
        }  # fmt: skip
        plain = {
            above: path
            for path, stated in modules.stated.items() if stated.ins
            for above in (path, *around(path)) if above.rpartition(".")[2].isdecimal()
        }  # fmt: skip
        for path, layer in modules.layers.items():
            block = next((above for above in around(path) if above in plain), None)
            if layer.kind.name not in ("norm", "embedding") or not layer.is_cut or layer.loose or layer.has_flow:
                continue
            if block is None or path in told or block in products:
                continue
            line = next((placed.line for placed in layer.params.values() if not placed.layout.is_replicated), None)
            yield Finding(
                "E403", f"`{path}` is cut, and the plan does not say how values pass it", origin_of(line),
                f"it gives a ShardedTensor then, and modules near it take plain values, such as `{plain[block]}`",
                "keep it whole: `replicate`" if layer.kind.name == "norm"
                else "say it: `colwise(...)` or `rowwise(...)`, or `in` and `out` in its block",
                style_note(origin_of(line), "layout"), path,
            )  # fmt: skip

    def _forgotten(self, is_whole: bool) -> Iterator[Finding]:
        """Parameters of modules of which nothing is said, that meet addends, streams, or cut values beside them."""
        modules = self._modules
        cut_beside = self._cut_beside() if is_whole else {}
        for path, params in modules.owned.items():
            stated = modules.stated.get(path)
            copied = [p for p in params.values() if p.layout.is_replicated and p.tensor.requires_grad]
            if stated is not None and (stated.ins or stated.outs):
                continue
            if any(not placed.layout.is_replicated for placed in params.values()):
                yield from self._cut(path, is_whole)
                continue
            if not copied:
                continue
            around_it = modules.nearest_in(path)
            addends = self._meetings.addends.get(around_it, ()) if around_it is not None else ()
            parent = path.rpartition(".")[0] if path else None
            beside = cut_beside.get(parent, {}) if parent is not None else {}
            gathered = self._meetings.gathers(path)
            streams = [axis for axis in self._meetings.streams if axis not in gathered]
            if addends:
                axes = addends
                first = self._meetings.served[around_it or ""][0].path
                why = f"the `in` of {around_it or 'the module'} sums what comes back along {modules.named(axes)}, for "
                why += f"{first} is cut: the gradients here may be addends, or copies"
            elif beside:
                axis, other = next(iter(beside.items()))
                axes = tuple(beside)
                why = f"{other} beside it leaves values cut along {modules.named((axis,))}: met by such values, its "
                why += "gradients are addends; met by copies, they are copies"
            elif streams:
                axes = tuple(streams)
                other = self._meetings.streams[streams[0]]
                why = f"{other} leaves values cut along {modules.named(axes)}: if it meets such values, its gradients "
                why += "are addends, and one rank's would be taken for the sum"
            else:
                continue
            shown = modules.named(axes)
            quote = "" if modules.resolved.plan.sources else '"'  # rules in Python
            cut, whole = (f"along({quote}{stream}{quote})" for stream in (f"[-, {shown}, ...]", "replicate"))
            fix = f"write `{cut}` if values come cut so, `{whole}` if they come whole"
            if addends and not beside:
                fix += "; or move `in` to the modules that are cut, so that this one is not inside"
            name = copied[0].tensor.name
            yield Finding(
                "E401", f"the gradient of `{name}` along {shown} is not known", _place(copied[0].line, modules),
                why, fix,
                (), name,
            )  # fmt: skip

    def _cut(self, path: str, is_whole: bool) -> Iterator[Finding]:
        """A cut module of which nothing is said, so that it takes and gives ShardedTensors, where plain values pass."""
        modules, meetings, stated = self._modules, self._meetings, self._modules.stated.get(path)
        layer, around_it = modules.layers.get(path), modules.nearest_in(path)
        addends = meetings.addends.get(around_it, ()) if around_it is not None and layer is None else ()
        streams = [axis for axis in meetings.streams if axis not in meetings.gathers(path)]
        if is_whole and layer is not None and layer.kind.name == "linear":
            streams = []  # it is told with streams
        if not (addends or streams) or (stated is not None and stated.passing.uses):
            return
        placed = next(p for p in modules.owned[path].values() if not p.layout.is_replicated)
        why = f"{placed.tensor.name} is `{placed.spec}`, so it takes and gives ShardedTensors; "
        if addends:
            why += f"their gradients are complete, and the `in` of {around_it or 'the module'} sums what comes back "
            why += f"along {modules.named(addends)}: they would be counted {modules.times(addends)} times"
        else:
            why += f"{meetings.streams[streams[0]]} leaves plain values cut along {modules.named(streams)}, and it "
            why += "would take a part for the whole, or leave a whole among parts"
        yield Finding(
            "E401" if addends else "E403", f"`{path}` is cut, and the plan does not say how values pass it",
            origin_of(placed.line), why,
            "say it: `in` and `out` in its block, or a style such as `colwise(...)` or `vocab_embedding(...)`",
            style_note(origin_of(placed.line), "layout"), path,
        )  # fmt: skip

    def _cut_beside(self) -> dict[str, dict[str, str]]:
        """By each module, the axes along which one directly in it leaves values cut, and which one."""
        found: dict[str, dict[str, str]] = {}
        for path, stated in self._modules.stated.items():
            if not path or path in self._to_hooks:
                continue
            gathered = self._meetings.gathers(path)
            outside = set(self._meetings.streams) - gathered  # where every forgotten parameter is told already
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
