"""Sums of gradients at the `in` of modules: what would be counted several times, or may be no addend (E401)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.places import origin_of, style_note
from shardtensor.plan.flows.flow import cut_axes, partial_axes
from shardtensor.plan.flows.layer_flows import addends_of
from shardtensor.plan.flows.meetings import Meetings
from shardtensor.plan.flows.modules import Layer, Names, Stated, around
from shardtensor.plan.line import Line


class Sums:
    """What is summed where gradients meet."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings, self._modules = meetings, meetings.modules

    def findings(self, is_whole: bool = True) -> Iterator[Finding]:
        """E401.

        Args:
            is_whole: what is not said of a module can be told by what is said of others alike.
        """
        yield from self._siblings_inside_an_axis()
        yield from self._copies_among_addends()
        yield from self._summed_again()
        if is_whole:
            yield from self._summed_otherwise()

    def _siblings_inside_an_axis(self) -> Iterator[Finding]:
        """Outputs that are cut along a factor and copied along another of the same axis."""
        modules = self._modules
        for path, stated in modules.stated.items():
            for name, flow in stated.outs.items():
                if flow.says_grad or path in self._meetings.broken:
                    continue
                cut, left = cut_axes(flow.after), partial_axes(flow.after)
                for whole in modules.axes.made_of:
                    factors = modules.leaves((whole,))
                    copies = [axis for axis in factors if axis not in (*cut, *left)]
                    inside = [axis for axis in cut if axis in factors]
                    if copies and inside:
                        line = stated.line("out", name)
                        yield _unknown_siblings(path, modules.nearest_in(path), whole, inside, copies, line)

    def _copies_among_addends(self) -> Iterator[Finding]:
        modules = self._modules
        for path, layers in self._meetings.served.items():
            addends = self._meetings.addends.get(path, ())
            if not addends:
                continue
            for layer in layers:
                own = addends_of(layer) if layer.has_flow else ()
                if set(own) == set(addends) or (layer.has_flow and self._is_told(layer)):
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

    def _is_told(self, layer: Layer) -> bool:
        """Whether it is told already that the gradient of its output is not known."""
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
            above = modules.nearest_in(path)
            addends = self._meetings.addends.get(above, ()) if above is not None else ()
            if above is None or not addends or set(cut_axes(flow.before)) & set(addends):
                continue
            layer = modules.layers.get(path)
            if layer is not None and layer.kind.name == "embedding":
                continue
            if self._has_copies_before(path, above, addends):
                continue
            line = stated.line("in")
            of = f"the `in` of {above or 'the module'}"
            if layer is not None and layer.kind.name == "norm":
                out = stated.out
                if out is not None and (out.says_grad or set(cut_axes(out.after)) & set(addends)):
                    continue
                line = stated.line("out") or line
                yield Finding(
                    "E401", f"addends along {modules.named(addends)} come back to this norm", origin_of(line),
                    f"it stands between {of} and products that are cut along {modules.named(addends)}, which leave "
                    "their addends to that `in`: the gradients of its parameters would stay one rank's addend",
                    f"write `grad partial({modules.named(addends)})` after its `out`, or put `in` after it, on the "
                    "module that holds the products",
                    style_note(origin_of(line), "flow"), path,
                )  # fmt: skip
                continue
            own = addends_of(layer) if layer is not None else self._meetings.addends.get(path, ())
            if set(own) & set(addends):
                yield Finding(
                    "E401", f"this gradient is summed along {modules.named(own)} here and again around",
                    origin_of(line),
                    f"{of} sums what comes back along {modules.named(addends)}; {path} sums its part before: "
                    f"it would be counted {modules.times(addends)} times",
                    f"drop `in` here, or {of}", style_note(origin_of(line), "flow"), path,
                )  # fmt: skip

    def _summed_otherwise(self) -> Iterator[Finding]:
        """Modules whose `in` sums what layers leave, beside others alike that have none: there the layers sum it."""
        modules = self._modules
        for path, addends in self._meetings.addends.items():
            parent, _, number = path.rpartition(".")
            if not addends or not number.isdecimal():
                continue
            other = f"{parent}.{int(number) + 1}".lstrip(".")
            if other not in modules.places:
                other = f"{parent}.{int(number) - 1}".lstrip(".")
            if other not in modules.places or modules.stated.get(other, Stated()).ins:
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

    def _has_copies_before(self, path: str, above: str, axes: Names) -> bool:
        """Whether a module in `above` that stands before `path` leaves copies, which it may take."""
        places = self._modules.places
        here = places.get(path, 0)
        for other in self._copying.get(above, ()):
            flow = self._modules.stated[other].out
            assert flow is not None
            left = {*cut_axes(flow.after), *partial_axes(flow.after)}
            if other != path and places.get(other, 0) < here and not left & set(axes):
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
