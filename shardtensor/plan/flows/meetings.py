"""What meets at the `in` of a module: addends and copies (E401), values of other widths (E403)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.origin import Origin
from shardtensor.plan.findings.places import style_note
from shardtensor.plan.flows.flow import cut_axes, cuts, last_cut, partial_axes
from shardtensor.plan.flows.layer_flows import addends_of
from shardtensor.plan.flows.modules import Layer, Modules, Names, Stated, around
from shardtensor.plan.line import Line


class Meetings:
    """Which layers each `in` serves, and what comes back to it.

    Args:
        broken: layers that contradict themselves, of which nothing is said here.
    """

    def __init__(self, modules: Modules, broken: frozenset[str] = frozenset()) -> None:
        self.modules, self._broken = modules, broken
        self._gathers: dict[str, set[str]] = {}

    @cached_property
    def served(self) -> dict[str, list[Layer]]:
        """By the path of a module with an `in`, the layers in it whose inputs it serves: no other `in` is between."""
        found: dict[str, list[Layer]] = {}
        for path, layer in self.modules.layers.items():
            takes_copies = layer.kind.name == "norm" or (layer.kind.name == "linear" and not layer.cut("weight", "in"))
            if path in self._broken or layer.stated.ins or not takes_copies or not (layer.has_flow or layer.is_cut):
                continue
            nearest = self.modules.nearest_in(path)
            if nearest is not None:
                found.setdefault(nearest, []).append(layer)
        return found

    @cached_property
    def addends(self) -> dict[str, Names]:
        """By the path of a module with an `in`, the axes along which what comes back to it is an addend."""
        found = {}
        for path, layers in self.served.items():
            if any(self._is_cut(placed) for placed in self.modules.owned.get(path, {}).values()):
                continue  # it works on ShardedTensors, whose gradients are complete
            each = [addends_of(layer) for layer in layers if layer.has_flow]
            found[path] = max(each, key=len, default=())
        return found

    def _is_cut(self, placed: object) -> bool:
        return not placed.layout.is_replicated  # type: ignore[attr-defined]

    @cached_property
    def _widths(self) -> dict[str, dict[int, list[str]]]:
        """By each module and width, the layers in it that leave values of this width."""
        found: dict[str, dict[int, list[str]]] = {}
        for path, layer in self.modules.layers.items():
            if layer.kind.name == "linear" and path not in self._broken:
                for above in around(path):
                    found.setdefault(above, {}).setdefault(layer.width("out"), []).append(path)
        return found

    @cached_property
    def streams(self) -> dict[str, str]:
        """Axes along which some `out` deals values out on a dim that is not the last, with the path of the first."""
        found: dict[str, str] = {}
        for (axis, _), path in self.dealt.items():
            found.setdefault(axis, path)
        return found

    @cached_property
    def dealt(self) -> dict[tuple[str, int], str]:
        """Axes and dims along which some `out` deals values out, dims that are not the last, with the path of the
        first."""
        found: dict[tuple[str, int], str] = {}
        for path, stated in self.modules.stated.items():
            for flow in stated.outs.values():
                before = set(cut_axes(flow.before))
                for dim, cut in cuts(flow.after).items():
                    for axis in cut.axes if dim != -1 else ():
                        if axis not in before:
                            found.setdefault((axis, dim), path)
        return found

    def gathers(self, path: str) -> set[str]:
        """The axes along which some module around a path gathers the values that enter it."""
        parent = path.rpartition(".")[0] if path else None
        return self._gathered(parent) if parent is not None else set()

    def _gathered(self, path: str) -> set[str]:
        """The axes along which a module, or one around it, gathers what enters it."""
        if path not in self._gathers:
            stated = self.modules.stated.get(path)
            flows = stated.ins.values() if stated is not None else ()
            own = {axis for flow in flows for axis in set(cut_axes(flow.before)) - set(cut_axes(flow.after))}
            self._gathers[path] = own | (self._gathered(path.rpartition(".")[0]) if path else set())
        return self._gathers[path]

    # -- findings -----------------------------------------------------------------------------------------------------

    def findings(self, is_whole: bool = True) -> Iterator[Finding]:
        """E401.

        Args:
            is_whole: what is not said can be told by what is said of others.
        """
        yield from self._siblings_inside_an_axis()
        yield from self._copies_among_addends()
        yield from self._summed_again()
        if is_whole:
            yield from self._summed_otherwise()
            yield from self._among_plain_values()
            yield from self._of_another_width()

    def _siblings_inside_an_axis(self) -> Iterator[Finding]:
        """Outputs that are cut along a factor and copied along another of the same axis."""
        modules = self.modules
        for path, stated in modules.stated.items():
            for name, flow in stated.outs.items():
                if flow.says_grad or path in self._broken:
                    continue
                cut, left = cut_axes(flow.after), partial_axes(flow.after)
                for whole in modules.axes.made_of:
                    factors = modules.leaves((whole,))
                    copies = [axis for axis in factors if axis not in (*cut, *left)]
                    inside = [axis for axis in cut if axis in factors]
                    if copies and inside:
                        line = stated.line("out", name)
                        yield _unknown_siblings(path, whole, inside, copies, line)

    def _copies_among_addends(self) -> Iterator[Finding]:
        modules = self.modules
        for path, layers in self.served.items():
            addends = self.addends.get(path, ())
            if not addends:
                continue
            for layer in layers:
                own = addends_of(layer) if layer.has_flow else ()
                if set(own) == set(addends) or (layer.has_flow and self._is_told(layer)):
                    continue
                what = f"addends along {modules.named(own)}" if own else "copies"
                how = "passes ShardedTensors, whose gradients are complete" if not layer.has_flow else f"brings {what}"
                line = layer.stated.line("out") or layer.params["weight"].line
                yield Finding(
                    "E401", f"copies meet addends at the `in` of {path or 'the module'}", _origin(line),
                    f"{layer.path} {how}, the others bring addends along {modules.named(addends)}, which `in` sums: "
                    f"what is no addend would be counted {modules.times(addends)} times",
                    "give it an `in` of its own, or move `in` down to those that are cut alike",
                    style_note(_origin(line), "flow") if layer.has_flow else (), layer.path,
                )  # fmt: skip

    def _is_told(self, layer: Layer) -> bool:
        """Whether it is told already that the gradient of its output is not known."""
        flow = layer.stated.out
        cut = cut_axes(flow.after) if flow is not None else ()
        return flow is not None and not flow.says_grad and any(
            set(cut) & set(factors) and set(factors) - {*cut, *partial_axes(flow.after)}
            for factors in (self.modules.leaves((whole,)) for whole in self.modules.axes.made_of)
        )  # fmt: skip

    def _of_another_width(self) -> Iterator[Finding]:
        """Layers that an `in` would serve, but for their width: they take a value that is left cut inside (E403)."""
        modules = self.modules
        for path, layers in self.served.items():
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
                    "E403", f"`{layer.path}` takes whole values, and `{other}` leaves them cut", _origin(line),
                    f"it multiplies all {width} elements of its input, and each rank has a part of them: "
                    f"`{modules.stated[other].passing.outs[''][0]}`",
                    f"cut it along its inputs: `rowwise({modules.named(cut_axes(flow.after))})`",
                    style_note(_origin(line), "flow"), layer.path,
                )  # fmt: skip

    def _summed_again(self) -> Iterator[Finding]:
        """Modules inside of an `in` that sums, with an `in` of their own on what must be the same value."""
        modules = self.modules
        for path, stated in modules.stated.items():
            flow = stated.ins.get("")
            if flow is None or flow.says_grad or path in self._broken:
                continue
            above = modules.nearest_in(path)
            addends = self.addends.get(above, ()) if above is not None else ()
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
                    "E401", f"addends along {modules.named(addends)} come back to this norm", _origin(line),
                    f"it stands between {of} and products that are cut along {modules.named(addends)}, which leave "
                    "their addends to that `in`: the gradients of its parameters would stay one rank's addend",
                    f"write `grad partial({modules.named(addends)})` after its `out`, or put `in` after it, on the "
                    "module that holds the products",
                    style_note(_origin(line), "flow"), path,
                )  # fmt: skip
                continue
            own = addends_of(layer) if layer is not None else self.addends.get(path, ())
            if set(own) & set(addends):
                yield Finding(
                    "E401", f"this gradient is summed along {modules.named(own)} here and again around",
                    _origin(line),
                    f"{of} sums what comes back along {modules.named(addends)}; {path} sums its part before: "
                    f"it would be counted {modules.times(addends)} times",
                    f"drop `in` here, or {of}", style_note(_origin(line), "flow"), path,
                )  # fmt: skip

    def _summed_otherwise(self) -> Iterator[Finding]:
        """Modules whose `in` sums what layers leave, beside others alike that have none: there the layers sum it."""
        modules = self.modules
        for path, addends in self.addends.items():
            parent, _, number = path.rpartition(".")
            if not addends or not number.isdecimal():
                continue
            other = f"{parent}.{int(number) + 1}".lstrip(".")
            if other not in modules.places:
                other = f"{parent}.{int(number) - 1}".lstrip(".")
            if other not in modules.places or modules.stated.get(other, Stated()).ins:
                continue
            line = modules.stated[path].line("in")
            first = self.served[path][0]
            holder = first.path.rpartition(".")[0]
            yield Finding(
                "E401", f"this `in` sums the gradients that layers inside leave along {modules.named(addends)}",
                _origin(line),
                f"{first.path} leaves its own to it; in {other}, which has no `in`, the same layer sums for itself: "
                "what stands between them, a norm or a residual, would get one rank's addend here",
                f"say how values enter `{holder if holder != path else first.path}`: `in: replicate` there",
                style_note(_origin(line), "flow"), path,
            )  # fmt: skip

    def _among_plain_values(self) -> Iterator[Finding]:
        """Norms and tables that are cut and give ShardedTensors, in one of several modules alike where plain values
        pass (E403). Products may: a pair of them gives whole values again."""
        modules = self.modules
        told = {layer.path for path, layers in self.served.items() if self.addends.get(path) for layer in layers}
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
                "E403", f"`{path}` is cut, and the plan does not say how values pass it", _origin(line),
                f"it gives a ShardedTensor then, and modules near it take plain values, such as `{plain[block]}`",
                "keep it whole: `replicate`" if layer.kind.name == "norm"
                else "say it: `colwise(...)` or `rowwise(...)`, or `in` and `out` in its block",
                style_note(_origin(line), "layout"), path,
            )  # fmt: skip

    def _has_copies_before(self, path: str, above: str, axes: Names) -> bool:
        """Whether a module in `above` that stands before `path` leaves copies, which it may take."""
        places = self.modules.places
        here = places.get(path, 0)
        for other in self._copying.get(above, ()):
            flow = self.modules.stated[other].out
            assert flow is not None
            left = {*cut_axes(flow.after), *partial_axes(flow.after)}
            if other != path and places.get(other, 0) < here and not left & set(axes):
                return True
        return False

    @cached_property
    def _copying(self) -> dict[str, list[str]]:
        """By each module, those in it that make values of their own, and say how these leave."""
        found: dict[str, list[str]] = {}
        for path, stated in self.modules.stated.items():
            layer = self.modules.layers.get(path)
            if stated.out is None or (layer is not None and layer.kind.name == "norm"):
                continue
            for above in around(path):
                found.setdefault(above, []).append(path)
        return found


def _unknown_siblings(path: str, whole: str, inside: list[str], copies: list[str], line: Line | None) -> Finding:
    cut, copied = "*".join(inside), "*".join(copies)
    origin = _origin(line)
    call = re.fullmatch(r"colwise\(\s*([^,)]+)(.*)\)", origin.text, re.DOTALL) if origin is not None else None
    sums = f"`grad partial({copied})` after the flow sums over the copies"
    if call is not None and "blocks" not in call[2]:
        sums = f"`colwise_shared({call[1].strip()}, copies={copied}{call[2]})` sums over the copies"
    return Finding(
        "E401", f"the gradient of this output along {copied} is not known", origin,
        f"the output is cut by {cut} and copied along its sibling {copied} inside {whole}: the copies may feed "
        "different query heads, and then their gradients differ",
        f"{sums}; if every copy gets the same gradient, write the flow with `grad replicate`",
        style_note(origin, "flow"), path,
    )  # fmt: skip


def _origin(line: Line | None) -> Origin | None:
    return line.origin if line is not None else None
