"""Values that go from module to module cut along tokens, and those that take or leave them whole (E403).

Layers that are alike, `layers.0`, `layers.1` ..., hear of each other; what stands outside of them the first one hears.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from shardtensor.plan.findings.brief import skeleton
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.findings.places import origin_of, style_note
from shardtensor.plan.flows.flow import Flow, as_written, cut_axes, cuts, partial_axes
from shardtensor.plan.flows.layer_flows import LayerWork
from shardtensor.plan.flows.meetings import Meetings
from shardtensor.plan.flows.modules import Layer, Modules, around, is_inside


class Streams:
    """For each axis along which values are dealt out by tokens: who takes and who leaves them whole."""

    def __init__(self, modules: Modules, meetings: Meetings, works: Mapping[str, LayerWork]) -> None:
        self._modules, self._meetings, self._works = modules, meetings, works

    def findings(self) -> Iterator[Finding]:
        """E403 for modules that take whole values where none come, or leave such where none are taken."""
        modules = self._modules
        if not any(layer.kind.name == "embedding" for layer in modules.layers.values()):
            return  # whole values may come from outside
        for axis in self._meetings.streams:
            if axis in self._beside or self._is_silent(axis):
                continue  # told with the others, or what some module gives is not known
            takers = list(self._takers(axis))
            makers = list(self._makers(axis))
            for path in takers:
                if not self._hears(path, makers, axis):
                    yield self._takes_whole(path, axis)
            for path in makers:
                if self._leaves(path, axis) and not self._is_heard(path, takers, axis):
                    yield self._leaves_whole(path, axis)

    def _is_silent(self, axis: str) -> bool:
        """Whether a module that gathers nothing works with whole parameters and does not say how values pass it."""
        modules = self._modules
        for path in modules.owned:
            stated, layer = modules.stated.get(path), modules.layers.get(path)
            is_told = (stated is not None and bool(stated.ins or stated.outs)) or (layer is not None and layer.is_cut)
            if not is_told and axis not in self._meetings.gathers(path):
                return True
        return False

    def _takers(self, axis: str) -> Iterator[str]:
        """Modules, not inside of one that gathers, that take values whole."""
        modules = self._modules
        for path in dict.fromkeys((*modules.stated, *modules.layers)):
            layer = modules.layers.get(path)
            if axis in self._gathers[path] or (layer is not None and layer.kind.name == "embedding"):
                continue
            stated = modules.stated.get(path)
            flow = stated.ins.get("") if stated is not None else None
            if flow is not None:
                if axis not in (*cut_axes(flow.before), *partial_axes(flow.before)):
                    yield path
            elif layer is not None and _takes_copies(layer, axis):
                nearest = modules.nearest_in(path)
                came = modules.stated[nearest].ins.get("") if nearest is not None else None
                if came is None or axis in cut_axes(came.after):
                    yield path

    def _makers(self, axis: str) -> Iterator[str]:
        """Modules that make values of their own and leave them whole."""
        for path in self._modules.stated:
            layer = self._modules.layers.get(path)
            flow = self._out(path)
            if flow is None or (layer is not None and layer.kind.name == "norm" and flow.before == flow.after):
                continue
            if axis not in (*cut_axes(flow.after), *partial_axes(flow.after)):
                yield path

    def _out(self, path: str) -> Flow | None:
        """How a module leaves its first result, said or following from a weight."""
        said, work = self._modules.stated[path].out, self._works.get(path)
        return work.leaves if said is None and work is not None else said

    @cached_property
    def _beside(self) -> set[str]:
        """Axes that always deal values out together with one before them."""
        return {axis for axis in self._meetings.streams if self._together(axis)[0] != axis}

    def _together(self, axis: str) -> tuple[str, ...]:
        """The axes along which values are dealt out where they are along this one."""
        flows = self._modules.stated[self._meetings.streams[axis]].outs.values()
        return next(cut.axes for flow in flows for cut in cuts(flow.after).values() if axis in cut.axes)

    @cached_property
    def _gathers(self) -> dict[str, set[str]]:
        return {path: self._meetings.gathers(path) for path in (*self._modules.stated, *self._modules.layers)}

    def _hears(self, path: str, makers: Sequence[str], axis: str) -> bool:
        """Whether a module that takes whole values may get one of those that are left so."""
        block = _block(path)
        if not block:
            dealing, places = self._last_before(path, axis), self._modules.places
            return any(  # of layers that deal values out, and of what stands after them
                not dealing
                or (_block(other) and skeleton(_block(other)) == skeleton(dealing))
                or places.get(dealing, 0) < places.get(other, 0) < places.get(path, 0)
                for other in makers
            )
        if path != block and any(skeleton(_block(other)) == skeleton(block) for other in makers):
            return True
        number = int(block.rpartition(".")[2])
        entering = self._modules.stated.get(block)
        is_first = f"{block.rpartition('.')[0]}.{number - 1}".lstrip(".") not in self._modules.places
        is_open = path == block or entering is None or not entering.ins
        return is_first and is_open and any(not _block(other) for other in makers)

    def _last_before(self, path: str, axis: str) -> str:
        """The last layer before a module, one of several alike, in which values are dealt out; empty without one."""
        places = self._modules.places
        here = places.get(path, 0)
        found = {
            _block(other): None
            for other, stated in self._modules.stated.items()
            if places.get(other, 0) < here and any(axis in cut_axes(flow.after) for flow in stated.outs.values())
        }
        return max(filter(None, found), key=lambda block: places.get(block, 0), default="")

    def _leaves(self, path: str, axis: str) -> bool:
        """Whether what a module makes goes beyond those around it that gather."""
        own = self._out(path)
        if not _block(path) and own is not None and axis in cut_axes(own.before):
            return self._is_taken_later(path, axis)  # else it gathers, once in the model: a last norm lets values go
        if axis not in self._gathers[path]:
            return True
        modules = self._modules
        around_it = next(above for above in around(path) if axis in self._gathered_by(above))
        if not _block(path) or modules.stated[around_it].outs:
            return False
        here = modules.places.get(path, 0)
        return not any(
            is_inside(other, around_it) and modules.places.get(other, 0) > here and not layer.cut("weight", "in")
            for other, layer in modules.layers.items()
        )

    def _is_taken_later(self, path: str, axis: str) -> bool:
        """Whether a module after this one, outside of layers that are alike, takes values cut along an axis."""
        places = self._modules.places
        return any(
            not _block(other) and places.get(other, 0) > places.get(path, 0) and axis in _tokens(flow)
            for other, stated in self._modules.stated.items()
            if not is_inside(other, path)
            for flow in stated.ins.values()
        )

    def _gathered_by(self, path: str) -> set[str]:
        stated = self._modules.stated.get(path)
        flows = stated.ins.values() if stated is not None else ()
        return {axis for flow in flows for axis in set(cut_axes(flow.before)) - set(cut_axes(flow.after))}

    def _is_heard(self, path: str, takers: Sequence[str], axis: str) -> bool:
        block, places, own = _block(path), self._modules.places, self._out(path)
        later = (other for other in takers if places.get(other, 0) > places.get(path, 0))
        if not block:
            is_gathered = own is not None and axis in cut_axes(own.before)  # it stands after what dealt it out
            return any(True for _ in later) if is_gathered else bool(takers)
        inside = (other for other in takers if other != _block(other) and skeleton(_block(other)) == skeleton(block))
        return any(not _block(other) or other == _block(other) for other in later) or any(inside)

    def _takes_whole(self, path: str, axis: str) -> Finding:
        modules = self._modules
        stated = modules.stated.get(path)
        line = stated.line("in") if stated is not None else None
        if line is None:
            layer = modules.layers[path]
            line = layer.stated.line("out") or layer.params["weight"].line
        origin = origin_of(line)
        source, after = self._source(axis)
        axes = modules.named(self._together(axis))
        is_norm = path in modules.layers and modules.layers[path].kind.name == "norm"
        return Finding(
            "E403", f"`{path}` takes whole values, and they come cut along {axes}", origin,
            f"every module leaves them so, such as `{source}`: `{after}`; one rank's part would be taken for the whole",
            f"take them as they come: `along({after})`" if is_norm
            else f"`in: {after} -> replicate` gathers them, here or on the module around",
            style_note(origin, "flow"), path,
        )  # fmt: skip

    def _leaves_whole(self, path: str, axis: str) -> Finding:
        modules = self._modules
        line = modules.stated[path].line("out")
        said = modules.stated[path].passing.outs[""][0] if line is not None else self._out(path)
        assert said is not None, "it makes values"
        origin = origin_of(line if line is not None else modules.layers[path].params["weight"].line)
        source, after = self._source(axis)
        axes = modules.named(self._together(axis))
        return Finding(
            "E403", f"`{path}` leaves whole values, and all modules take them cut along {axes}",
            origin,
            f"they expect `{after}`, as `{source}` leaves it: each rank's whole would be taken for a part of a longer "
            "one",
            f"write `out: {after if said.before == after else f'{as_written(said.before)} -> {after}'}`",
            style_note(origin, "flow"), path,
        )  # fmt: skip

    def _source(self, axis: str) -> tuple[str, object]:
        """A module that deals values out, and how."""
        source = self._meetings.streams[axis]
        return source, next(flow.after for flow, _ in self._modules.stated[source].passing.outs.values())


def _tokens(flow: Flow) -> set[str]:
    """The axes along which a value comes cut along a dim that is not the last."""
    return {axis for dim, cut in cuts(flow.before).items() if dim != -1 for axis in cut.axes}


def _takes_copies(layer: Layer, axis: str) -> bool:
    """Whether a layer without an `in` takes what comes as copies along an axis."""
    return layer.kind.name == "linear" and layer.is_cut and axis not in layer.cut("weight", "in")


def _block(path: str) -> str:
    """The outermost module around a path, or itself, that is one of several alike; empty where there is none."""
    found = [each for each in (path, *around(path)) if each.rpartition(".")[2].isdecimal()]
    return found[-1] if found else ""
