"""Find the sums of gradients, which the `in` of modules computes, and report doubled and missing ones (E401).

A missing or doubled sum raises no error in a run: losses fall all the same.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from functools import cached_property

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import cut_axes, cuts, partial_axes
from shardtensor.plan.flows.layer_flows import partials_of
from shardtensor.plan.flows.modules import Layer, Modules, Names, StatedFlows, around, flow_finding
from shardtensor.plan.line import origin_of, pattern_place
from shardtensor.plan.resolved import Placed
from shardtensor.spec.nodes import Spec


class Sums:
    """The layers that each `in` serves, and the axes along which it sums their gradients.

    Args:
        broken: layers that contradict themselves; they are not checked here.
    """

    def __init__(self, modules: Modules, broken: Container[str] = frozenset()) -> None:
        self._modules, self._broken = modules, broken
        self._gathered: dict[str, set[str]] = {}

    @cached_property
    def served(self) -> dict[str, list[Layer]]:
        """By the path of a module with an `in`, the layers in it that it serves: there is no other `in` between."""
        found: dict[str, list[Layer]] = {}
        for path, layer in self._modules.layers.items():
            takes_copies = layer.kind.name == "norm" or (layer.kind.name == "linear" and not layer.cut("weight", "in"))
            if path in self._broken or layer.stated.ins or not takes_copies or not (layer.has_flow or layer.is_cut):
                continue
            nearest = self._modules.nearest_in(path)
            if nearest is not None:
                found.setdefault(nearest, []).append(layer)
        return found

    @cached_property
    def partials(self) -> dict[str, Names]:
        """By the path of a module with an `in`, the axes along which its returning gradients are partial sums."""
        found = {}
        for path, layers in self.served.items():
            if self._modules.computes_on_sharded(path):
                continue  # their gradients are complete
            found[path] = max((partials_of(layer) for layer in layers if layer.has_flow), key=len, default=())
        return found

    def _around(self, path: str) -> tuple[str, Names]:
        """Return the name of the `in` that serves a path, and the axes along which it sums gradients."""
        nearest = self._modules.nearest_in(path)
        return f"the `in` of {nearest or 'the module'}", self.partials.get(nearest, ()) if nearest is not None else ()

    # -- values that are cut along tokens -----------------------------------------------------------------------------

    @cached_property
    def _streams(self) -> dict[str, tuple[int, str]]:
        """Axes over which some `out` shards values on a dim that is not the last, with the place and the path of the
        first such module."""
        found: dict[str, tuple[int, str]] = {}
        for path, stated in self._modules.stated.items():
            here = self._modules.places.get(path, 0), path
            for flow in stated.outs.values():
                axes = (axis for dim, cut in cuts(flow.after).items() if dim != -1 for axis in cut.axes)
                found |= {axis: min(found.get(axis, here), here) for axis in set(axes) - set(cut_axes(flow.before))}
        return found

    def _streams_into(self, path: str) -> list[str]:
        """Return those of `_streams` that no module around a path gathers at its `in`."""
        parent = path.rpartition(".")[0]
        if parent not in self._gathered:
            outer = [self._modules.stated[each] for each in (parent, *around(parent)) if each in self._modules.stated]
            flows = [flow for stated in outer for flow in stated.ins.values()] if path else []
            self._gathered[parent] = {a for f in flows for a in set(cut_axes(f.before)) - set(cut_axes(f.after))}
        return [axis for axis in self._streams if axis not in self._gathered[parent]]

    def _cut_beside(self, to_hooks: Container[str]) -> dict[str, dict[str, str]]:
        """Return for each module the axes along which a child returns sharded values, and the path of the child."""
        found: dict[str, dict[str, str]] = {}
        for path, stated in self._modules.stated.items():
            outside = self._streams_into(path)  # these report each parameter without flows already
            for flow in stated.outs.values() if path and path not in to_hooks else ():
                for dim, cut in cuts(flow.after).items():
                    for axis in cut.axes if dim == -1 or not outside else set(cut.axes) - set(outside):
                        found.setdefault(path.rpartition(".")[0], {}).setdefault(axis, path)
        return found

    # -- findings -----------------------------------------------------------------------------------------------------

    def findings(self, to_hooks: Container[str], is_whole: bool) -> Iterator[Finding]:
        """Yield E401, and E403 for sharded modules without flows among plain values that are sharded.

        Args:
            to_hooks: modules whose result a hook takes.
            is_whole: whether the plan has rules for the whole model.
        """
        beside = self._cut_beside(to_hooks) if is_whole else {}
        for path, stated in self._modules.stated.items():
            if path not in self._broken:
                yield from self._siblings_inside_an_axis(path, stated)
        yield from self._replicas_among_partials()
        for path, stated in self._modules.stated.items():
            if path not in self._broken:
                yield from self._summed_again(path, stated)
        if is_whole:
            yield from self._summed_otherwise()
        yield from self._norms_of_whole_values()
        for path, params in self._modules.owned.items():
            if (flows := self._modules.stated.get(path)) is not None and (flows.ins or flows.outs):
                continue
            of_interest = [each for each in params.values() if not each.layout.is_replicated]
            of_interest += [each for each in params.values() if each.tensor.requires_grad]
            for placed in of_interest[:1]:
                yield from self._without_flows(path, placed, beside.get(path.rpartition(".")[0], {}))

    def _unknown_siblings(self, stated: StatedFlows, name: str = "") -> tuple[str, str, str] | None:
        """Return an axis and two of its factors if an output is sharded along the one and copied along the other."""
        flow = stated.outs.get(name)
        for whole in self._modules.axes.made_of if flow is not None and not flow.declares_grad else ():
            assert flow is not None
            factors, cut = self._modules.leaves((whole,)), cut_axes(flow.after)
            copies = [axis for axis in factors if axis not in (*cut, *partial_axes(flow.after))]
            inside = [axis for axis in cut if axis in factors]
            if copies and inside:
                return whole, "*".join(inside), "*".join(copies)
        return None

    def _siblings_inside_an_axis(self, path: str, stated: StatedFlows) -> Iterator[Finding]:
        for name in stated.outs:
            if (found := self._unknown_siblings(stated, name)) is None:
                continue
            whole, cut, copied = found
            line, outer = stated.line("out", name), self._modules.nearest_in(path)
            origin = origin_of(line)
            call = re.fullmatch(r"colwise\(\s*([^,)]+)(.*)\)", origin.text, re.DOTALL) if origin is not None else None
            sums = f"`grad partial({copied})` after the flow sums over the copies"
            if call is not None and "blocks" not in call[2]:
                sums = f"`colwise_shared({call[1].strip()}, copies={copied}{call[2]})` sums over the copies"
            alone = "" if outer is None else f", and move the `in` of {outer or 'the module'} down to the layers in it"
            yield flow_finding(
                "E401", f"the gradient of this output along {copied} is not known", line,
                f"the output is cut by {cut} and copied along its sibling {copied} inside {whole}: the copies may feed "
                "different query heads, and then their gradients differ",
                f"{sums}; if every copy gets the same gradient, write the flow with `grad replicate`{alone}", path,
            )  # fmt: skip

    def _replicas_among_partials(self) -> Iterator[Finding]:
        """Yield findings for an `in` that sums the gradients of all layers it serves, if only some are partial sums."""
        modules = self._modules
        for path, partials in self.partials.items():
            for layer in self.served[path] if partials else ():
                own = partials_of(layer) if layer.has_flow else ()
                if set(own) == set(partials) or (layer.has_flow and self._unknown_siblings(layer.stated) is not None):
                    continue
                how = f"leaves {f'partial sums along {modules.named(own)}' if own else 'copies'}"
                if not layer.has_flow:
                    how = "passes ShardedTensors, whose gradients are complete"
                yield flow_finding(
                    "E401", f"copies meet partial sums at the `in` of {path or 'the module'}",
                    layer.stated.line("out") or layer.params["weight"].line,
                    f"{layer.path} {how}, the others leave partial sums along {modules.named(partials)}, which `in` "
                    f"sums: what is no partial sum would be counted {modules.times(partials)} times",
                    "move `in` down to those that are cut alike", layer.path, "flow" if layer.has_flow else "",
                )  # fmt: skip

    def _summed_again(self, path: str, stated: StatedFlows) -> Iterator[Finding]:
        """Yield findings for a module inside of an `in` that sums, if it has its own `in` on the same value."""
        flow, layer, modules = stated.ins.get(""), self._modules.layers.get(path), self._modules
        of, partials = self._around(path)
        kind, named = layer.kind.name if layer is not None else "", modules.named(partials)
        if flow is None or flow.declares_grad or not partials or set(cut_axes(flow.before)) & set(partials):
            return
        if kind == "embedding" or self._has_copies_before(path, partials):
            return
        if kind == "norm":
            out = stated.out
            if out is None or not (out.declares_grad or set(cut_axes(out.after)) & set(partials)):
                yield flow_finding(
                    "E401", f"partial sums along {named} come back to this norm",
                    stated.line("out") or stated.line("in"),
                    f"it stands between {of} and products that are cut along {named}, which leave their partial sums "
                    "to that `in`: the gradients of its parameters would stay one rank's partial sum",
                    f"write `grad partial({named})` after its `out`, or put `in` after it, on the module that holds "
                    "the products", path,
                )  # fmt: skip
            return
        own = partials_of(layer) if layer is not None else self.partials.get(path, ())
        if set(own) & set(partials):
            yield flow_finding(
                "E401", f"this gradient is summed along {modules.named(own)} here and again around", stated.line("in"),
                f"{of} sums what comes back along {named}; {path} sums its part before: "
                f"it would be counted {modules.times(partials)} times",
                f"drop `in` here, or {of}", path,
            )  # fmt: skip

    def _has_copies_before(self, path: str, axes: Names) -> bool:
        """Whether a module before `path`, under the same `in`, returns copies, which `path` may take."""
        above, places = self._modules.nearest_in(path), self._modules.places
        return any(
            places.get(other, 0) < places.get(path, 0)
            for other, out in self._copying.get(above or "", ())
            if other != path and not {*cut_axes(out), *partial_axes(out)} & set(axes)
        )

    @cached_property
    def _copying(self) -> dict[str, list[tuple[str, Spec]]]:
        """By each module, those in it that make new values, with the layouts that they return."""
        found: dict[str, list[tuple[str, Spec]]] = {}
        for path, stated in self._modules.stated.items():
            layer = self._modules.layers.get(path)
            if stated.out is not None and (layer is None or layer.kind.name != "norm"):
                for above in around(path):
                    found.setdefault(above, []).append((path, stated.out.after))
        return found

    def _summed_otherwise(self) -> Iterator[Finding]:
        """Yield findings for modules whose `in` sums gradients of layers, if in a similar module the layers do it."""
        modules = self._modules
        for path, partials in self.partials.items():
            parent, _, number = path.rpartition(".")
            if not partials or not number.isdecimal():
                continue
            alike = (f"{parent}.{int(number) + step}".lstrip(".") for step in (1, -1))
            other = next((each for each in alike if each in modules.places), None)
            if other is None or (other in modules.stated and modules.stated[other].ins):
                continue
            line = modules.stated[path].line("in")
            first = self.served[path][0]
            holder = first.path.rpartition(".")[0]
            yield flow_finding(
                "E401", f"this `in` sums the gradients that layers inside leave along {modules.named(partials)}", line,
                f"{first.path} leaves its own to it; in {other}, which has no `in`, the same layer sums for itself: "
                "what stands between them, a norm or a residual, would get one rank's partial sum here",
                f"say how values enter `{holder if holder != path else first.path}`: `in: replicate` there",
                path,
            )  # fmt: skip

    # -- modules without flows where values pass in parts -------------------------------------------------------------

    def _without_flows(self, path: str, placed: Placed, beside: Mapping[str, str]) -> Iterator[Finding]:
        """Yield a finding for a parameter of a module without flows, if values near it are sharded: a replicated one
        would get the gradient of one rank's part of them, a sharded one works on ShardedTensors among plain parts.

        Args:
            beside: the axes along which a module of the same parent returns sharded values, and its path.
        """
        modules, streams, is_cut = self._modules, self._streams_into(path), not placed.layout.is_replicated
        partials, stated = self._around(path)[1], modules.stated.get(path)
        if is_cut:
            partials, beside = () if path in modules.layers else partials, {}
        axes = partials or tuple(beside) or tuple(streams)
        if not axes or (is_cut and stated is not None and stated.module_flows.uses):
            return
        shown, name = modules.named(axes), placed.tensor.name
        near = beside.get(axes[0]) or (self._streams[axes[0]][1] if not partials else "")
        near = near or self.served[modules.nearest_in(path) or ""][0].path
        why = f"`{near}` leaves values cut along {shown}: "
        if is_cut:
            why += f"{name} is `{placed.spec}`, so this module works on ShardedTensors: it would take a part for the "
            why += "whole, or leave a whole among parts"
            yield flow_finding(
                "E403", f"`{path}` is cut, and the plan does not say how values pass it", placed.line, why,
                "say it: `in` and `out` in its block, or a style such as `colwise(...)` or `vocab_embedding(...)`",
                path, "layout",
            )  # fmt: skip
            return
        why += "met by such values, its gradients are partial sums; met by copies, they are copies"
        quote = "" if modules.resolved.plan.sources else '"'  # rules in Python
        cut, whole = (f"along({quote}{stream}{quote})" for stream in (f"[-, {shown}, ...]", "replicate"))
        fix = f"write `{cut}` if values come cut so, `{whole}` if they come whole"
        if partials and not beside:
            fix += "; or move `in` to the modules that are cut, so that this one is not inside"
        unmatched = modules.resolved.plan.unmatched
        at_unmatched = unmatched.origin if unmatched is not None else None
        place = pattern_place(placed.line) if placed.line is not None else at_unmatched
        yield Finding("E401", f"the gradient of `{name}` along {shown} is not known", place, why, fix, (), name)

    def _norms_of_whole_values(self) -> Iterator[Finding]:
        """Yield E403 for norms that take full values where every module returns them sharded along tokens: their
        parameters would get the gradients of one rank's tokens."""
        modules = self._modules
        if not any(layer.kind.name == "embedding" for layer in modules.layers.values()):
            return  # whole values may come from outside
        for path, layer in modules.layers.items():
            flow = layer.stated.ins.get("")
            if layer.kind.name != "norm" or flow is None:
                continue
            came = {*cut_axes(flow.before), *partial_axes(flow.before)}
            here = modules.places.get(path, 0)
            axes = [a for a in self._streams_at(path) if a not in came and self._left_whole.get(a, here) >= here]
            if not axes:
                continue
            source = self._streams[axes[0]][1]
            after = next(flow.after for flow, _ in modules.stated[source].module_flows.outs.values())
            line = layer.stated.line("in")
            yield flow_finding(
                "E403", f"`{path}` takes whole values, and they come cut along {modules.named(axes)}", line,
                f"every module leaves them so, such as `{source}`: `{after}`; one rank's part would be taken for the "
                "whole",
                f"take them as they come: `along({after})`", path,
            )  # fmt: skip

    @cached_property
    def _left_whole(self) -> dict[str, int]:
        """By the axes of streams, the place of the first module that makes and returns full values and is in no module
        that gathers."""
        found: dict[str, int] = {}
        for path, stated in self._modules.stated.items():
            layer = self._modules.layers.get(path)
            for flow in stated.outs.values():
                if layer is None or layer.kind.name != "norm" or flow.before != flow.after:  # a norm passes them on
                    left = {*cut_axes(flow.after), *partial_axes(flow.after)}
                    here = self._modules.places.get(path, 0)
                    found |= {a: min(found.get(a, here), here) for a in self._streams_at(path) if a not in left}
        return found

    def _streams_at(self, path: str) -> list[str]:
        """Return the axes of streams that begin before a module in the model, and that no module around it gathers."""
        here = self._modules.places.get(path, 0)
        return [axis for axis in self._streams_into(path) if self._streams[axis][0] <= here]
