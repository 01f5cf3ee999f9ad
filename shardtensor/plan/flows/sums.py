"""Gradients that would be summed several times, or not at all (E401). No run fails of that: losses fall all the same.

Looked at are the `in` of one module that sums gradients, with what stands inside of it; modules of which the plan says
nothing, where values pass in parts; and outputs that are cut over a part of an axis.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from functools import cached_property

from shardtensor.plan.findings.finding import Finding, Origin
from shardtensor.plan.findings.places import origin_of, pattern_place, style_note
from shardtensor.plan.flows.flow import cut_axes, cuts, partial_axes
from shardtensor.plan.flows.layer_flows import addends_of
from shardtensor.plan.flows.meetings import Meetings
from shardtensor.plan.flows.modules import Layer, Modules, Names, around
from shardtensor.plan.line import Line
from shardtensor.plan.resolved import Placed


class Sums:
    """What is summed where gradients meet."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings, self._modules = meetings, meetings.modules

    def findings(self, to_hooks: Container[str], is_whole: bool) -> Iterator[Finding]:
        """E401, and E403 for cut modules without flows where plain values pass in parts.

        Args:
            to_hooks: modules whose result a hook takes.
            is_whole: the plan speaks of the whole model.
        """
        beside = self._cut_beside(to_hooks) if is_whole else {}
        yield from self._siblings_inside_an_axis()
        yield from self._copies_among_addends()
        yield from self._summed_again()
        if is_whole:
            yield from self._summed_otherwise()
        yield from self._norms_of_whole_values()
        for path, params in self._modules.owned.items():
            stated = self._modules.stated.get(path)
            if stated is not None and (stated.ins or stated.outs):
                continue
            cut = next((placed for placed in params.values() if not placed.layout.is_replicated), None)
            trained = next((placed for placed in params.values() if placed.tensor.requires_grad), None)
            if cut is not None:
                yield from self._cut_without_flows(path, cut)
            elif trained is not None:
                yield from self._whole_without_flows(path, trained, beside.get(path.rpartition(".")[0], {}))

    # -- one output ---------------------------------------------------------------------------------------------------

    def _siblings_inside_an_axis(self) -> Iterator[Finding]:
        """Outputs that are cut along a factor and copied along another of the same axis."""
        for path, stated in self._modules.stated.items():
            if path in self._meetings.broken:
                continue
            for name, flow in stated.outs.items():
                for whole in self._modules.axes.made_of if not flow.says_grad else ():
                    factors = self._modules.leaves((whole,))
                    copies = [
                        axis for axis in factors if axis not in (*cut_axes(flow.after), *partial_axes(flow.after))
                    ]
                    inside = [axis for axis in cut_axes(flow.after) if axis in factors]
                    if copies and inside:
                        line = stated.line("out", name)
                        yield _unknown_siblings(path, self._modules.nearest_in(path), whole, inside, copies, line)

    # -- one `in` that sums, and what stands inside of it -------------------------------------------------------------

    def _copies_among_addends(self) -> Iterator[Finding]:
        modules = self._modules
        for path, layers in self._meetings.served.items():
            addends = self._meetings.addends.get(path, ())
            for layer in layers if addends else ():
                own = addends_of(layer) if layer.has_flow else ()
                if set(own) == set(addends) or (layer.has_flow and self._has_unknown_siblings(layer)):
                    continue
                what = f"addends along {modules.named(own)}" if own else "copies"
                how = "passes ShardedTensors, whose gradients are complete" if not layer.has_flow else f"brings {what}"
                line = layer.stated.line("out") or layer.params["weight"].line
                alone = "" if set(own) & set(addends) else "give it an `in` of its own, or "
                if not layer.has_flow:
                    alone = "say how its values leave, in an `out`, or "
                yield Finding(
                    "E401", f"copies meet addends at the `in` of {path or 'the module'}", origin_of(line),
                    f"{layer.path} {how}, the others bring addends along {modules.named(addends)}, which `in` sums: "
                    f"what is no addend would be counted {modules.times(addends)} times",
                    f"{alone}move `in` down to those that are cut alike",
                    style_note(origin_of(line), "flow") if layer.has_flow else (), layer.path,
                )  # fmt: skip

    def _has_unknown_siblings(self, layer: Layer) -> bool:
        """Whether `_siblings_inside_an_axis` reports it."""
        flow = layer.stated.out
        cut = cut_axes(flow.after) if flow is not None else ()
        return flow is not None and not flow.says_grad and any(
            set(cut) & set(factors) and set(factors) - {*cut, *partial_axes(flow.after)}
            for factors in (self._modules.leaves((whole,)) for whole in self._modules.axes.made_of)
        )  # fmt: skip

    def _summed_again(self) -> Iterator[Finding]:
        """Modules inside of an `in` that sums, with an `in` of their own on what must be the same value."""
        modules = self._modules
        for path, stated in modules.stated.items():
            flow = stated.ins.get("")
            if flow is None or flow.says_grad or path in self._meetings.broken:
                continue
            above, addends = self._meetings.around(path)
            layer = modules.layers.get(path)
            kind = layer.kind.name if layer is not None else ""
            if not addends or set(cut_axes(flow.before)) & set(addends) or kind == "embedding":
                continue
            if self._has_copies_before(path, above, addends):
                continue
            line, of, named = stated.line("in"), f"the `in` of {above or 'the module'}", modules.named(addends)
            if kind == "norm":
                out = stated.out
                if out is not None and (out.says_grad or set(cut_axes(out.after)) & set(addends)):
                    continue
                line = stated.line("out") or line
                yield Finding(
                    "E401", f"addends along {named} come back to this norm", origin_of(line),
                    f"it stands between {of} and products that are cut along {named}, which leave their addends to "
                    "that `in`: the gradients of its parameters would stay one rank's addend",
                    f"write `grad partial({named})` after its `out`, or put `in` after it, on the module that holds "
                    "the products",
                    style_note(origin_of(line), "flow"), path,
                )  # fmt: skip
                continue
            own = addends_of(layer) if layer is not None else self._meetings.addends.get(path, ())
            if set(own) & set(addends):
                yield Finding(
                    "E401", f"this gradient is summed along {modules.named(own)} here and again around",
                    origin_of(line),
                    f"{of} sums what comes back along {named}; {path} sums its part before: "
                    f"it would be counted {modules.times(addends)} times",
                    f"drop `in` here, or {of}", style_note(origin_of(line), "flow"), path,
                )  # fmt: skip

    def _has_copies_before(self, path: str, above: str, axes: Names) -> bool:
        """Whether a module in `above` that stands before `path` leaves copies, which it may take."""
        places, stated = self._modules.places, self._modules.stated
        for other in self._copying.get(above, ()):
            flow = stated[other].out
            assert flow is not None
            left = {*cut_axes(flow.after), *partial_axes(flow.after)}
            if other != path and places.get(other, 0) < places.get(path, 0) and not left & set(axes):
                return True
        return False

    @cached_property
    def _copying(self) -> dict[str, list[str]]:
        """By each module, those in it that make values of their own, and say how these leave."""
        found: dict[str, list[str]] = {}
        for path, stated in self._modules.stated.items():
            layer = self._modules.layers.get(path)
            if stated.out is None or (layer is not None and layer.kind.name == "norm"):
                continue
            for above in around(path):
                found.setdefault(above, []).append(path)
        return found

    # -- modules without flows where values pass in parts -------------------------------------------------------------

    def _whole_without_flows(self, path: str, placed: Placed, beside: Mapping[str, str]) -> Iterator[Finding]:
        """Parameters that are copied, and would get the gradient of one rank's part of the values.

        Args:
            beside: the axes along which a module of the same parent leaves values cut, and which one.
        """
        modules, (above, addends) = self._modules, self._meetings.around(path)
        streams = self._meetings.streams_into(path)
        axes = addends or tuple(beside) or tuple(streams)
        if not axes:
            return
        shown = modules.named(axes)
        if addends:
            first = self._meetings.served[above][0].path
            why = f"the `in` of {above or 'the module'} sums what comes back along {shown}, for {first} is cut: the "
            why += "gradients here may be addends, or copies"
        elif beside:
            why = f"{beside[axes[0]]} beside it leaves values cut along {modules.named(axes[:1])}: met by such values, "
            why += "its gradients are addends; met by copies, they are copies"
        else:
            why = f"{self._meetings.streams[streams[0]]} leaves values cut along {shown}: if it meets such values, its "
            why += "gradients are addends, and one rank's would be taken for the sum"
        quote = "" if modules.resolved.plan.sources else '"'  # rules in Python
        cut, whole = (f"along({quote}{stream}{quote})" for stream in (f"[-, {shown}, ...]", "replicate"))
        fix = f"write `{cut}` if values come cut so, `{whole}` if they come whole"
        if addends and not beside:
            fix += "; or move `in` to the modules that are cut, so that this one is not inside"
        name = placed.tensor.name
        place = _place(placed.line, modules)
        yield Finding("E401", f"the gradient of `{name}` along {shown} is not known", place, why, fix, (), name)

    def _summed_otherwise(self) -> Iterator[Finding]:
        """Modules whose `in` sums what layers leave, beside others alike that have none: there the layers sum it."""
        modules = self._modules
        for path, addends in self._meetings.addends.items():
            parent, _, number = path.rpartition(".")
            if not addends or not number.isdecimal():
                continue
            alike = (f"{parent}.{int(number) + step}".lstrip(".") for step in (1, -1))
            other = next((each for each in alike if each in modules.places), None)
            if other is None or (other in modules.stated and modules.stated[other].ins):
                continue
            line = modules.stated[path].line("in")
            first = self._meetings.served[path][0]
            holder = first.path.rpartition(".")[0]
            yield Finding(
                "E401", f"this `in` sums the gradients that layers inside leave along {modules.named(addends)}",
                origin_of(line),
                f"{first.path} leaves its own to it; in {other}, which has no `in`, the same layer sums for itself: "
                "what stands between them, a norm or a residual, would get one rank's addend here",
                f"say how values enter `{holder if holder != path else first.path}`: `in: replicate` there",
                style_note(origin_of(line), "flow"), path,
            )  # fmt: skip

    def _norms_of_whole_values(self) -> Iterator[Finding]:
        """Norms that take whole values where every module leaves them cut along tokens (E403): the gradients of their
        parameters would be of one rank's tokens."""
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
            source = self._meetings.streams[axes[0]]
            after = next(flow.after for flow, _ in modules.stated[source].passing.outs.values())
            line = layer.stated.line("in")
            yield Finding(
                "E403", f"`{path}` takes whole values, and they come cut along {modules.named(axes)}", origin_of(line),
                f"every module leaves them so, such as `{source}`: `{after}`; one rank's part would be taken for the "
                "whole",
                f"take them as they come: `along({after})`", style_note(origin_of(line), "flow"), path,
            )  # fmt: skip

    @cached_property
    def _left_whole(self) -> dict[str, int]:
        """By the axes of streams, the place of the first module, in none that gathers, that leaves whole values of its
        own."""
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
        """The axes of streams that begin before a module in the order of the model, and that none around it gathers."""
        here = self._modules.places.get(path, 0)
        return [axis for axis in self._meetings.streams_into(path) if self._begins[axis] <= here]

    @cached_property
    def _begins(self) -> dict[str, int]:
        """By the axes of streams, the place of the first module that cuts a value so."""
        found: dict[str, int] = {}
        for path, stated in self._modules.stated.items():
            here = self._modules.places.get(path, 0)
            for flow in (*stated.ins.values(), *stated.outs.values()):
                for dim, cut in cuts(flow.after).items():
                    for axis in cut.axes if dim != -1 else ():
                        found[axis] = min(found.get(axis, here), here)
        return found

    def _cut_beside(self, to_hooks: Container[str]) -> dict[str, dict[str, str]]:
        """By each module, the axes along which one directly in it leaves values cut, and which one."""
        found: dict[str, dict[str, str]] = {}
        for path, stated in self._modules.stated.items():
            outside = self._meetings.streams_into(path)  # where each parameter without flows is reported already
            for flow in stated.outs.values() if path and path not in to_hooks else ():
                for dim, cut in cuts(flow.after).items():
                    for axis in cut.axes:
                        if dim == -1 or axis not in outside:
                            found.setdefault(path.rpartition(".")[0], {}).setdefault(axis, path)
        return found

    def _cut_without_flows(self, path: str, placed: Placed) -> Iterator[Finding]:
        """A cut module of which nothing is said, so that it takes and gives ShardedTensors, where plain values pass."""
        modules, (above, addends) = self._modules, self._meetings.around(path)
        stated, streams = modules.stated.get(path), self._meetings.streams_into(path)
        addends = addends if path not in modules.layers else ()
        if not (addends or streams) or (stated is not None and stated.passing.uses):
            return
        why = f"{placed.tensor.name} is `{placed.spec}`, so it takes and gives ShardedTensors; "
        if addends:
            why += f"their gradients are complete, and the `in` of {above or 'the module'} sums what comes back "
            why += f"along {modules.named(addends)}: they would be counted {modules.times(addends)} times"
        else:
            why += f"{self._meetings.streams[streams[0]]} leaves plain values cut along {modules.named(streams)}, and "
            why += "it would take a part for the whole, or leave a whole among parts"
        origin = origin_of(placed.line)
        yield Finding(
            "E401" if addends else "E403", f"`{path}` is cut, and the plan does not say how values pass it", origin,
            why, "say it: `in` and `out` in its block, or a style such as `colwise(...)` or `vocab_embedding(...)`",
            style_note(origin, "layout"), path,
        )  # fmt: skip


def _unknown_siblings(
    path: str, around_it: str | None, whole: str, inside: list[str], copies: list[str], line: Line | None
) -> Finding:
    cut, copied = "*".join(inside), "*".join(copies)
    origin = origin_of(line)
    call = re.fullmatch(r"colwise\(\s*([^,)]+)(.*)\)", origin.text, re.DOTALL) if origin is not None else None
    sums = f"`grad partial({copied})` after the flow sums over the copies"
    if call is not None and "blocks" not in call[2]:
        sums = f"`colwise_shared({call[1].strip()}, copies={copied}{call[2]})` sums over the copies"
    alone = "" if around_it is None else f", and move the `in` of {around_it or 'the module'} down to the layers in it"
    return Finding(
        "E401", f"the gradient of this output along {copied} is not known", origin,
        f"the output is cut by {cut} and copied along its sibling {copied} inside {whole}: the copies may feed "
        "different query heads, and then their gradients differ",
        f"{sums}; if every copy gets the same gradient, write the flow with `grad replicate`{alone}",
        style_note(origin, "flow"), path,
    )  # fmt: skip


def _place(line: Line | None, modules: Modules) -> Origin | None:
    if line is not None:
        return pattern_place(line)
    unmatched = modules.resolved.plan.unmatched
    return unmatched.origin if unmatched is not None else None
