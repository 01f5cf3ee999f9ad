"""What meets at the `in` of a module: which layers it serves, and along which axes addends come back to it."""

from __future__ import annotations

from functools import cached_property
from itertools import takewhile

from shardtensor.plan.flows.flow import cut_axes, cuts
from shardtensor.plan.flows.layer_flows import addends_of
from shardtensor.plan.flows.modules import Layer, Modules, Names, around


class Meetings:
    """Which layers each `in` serves, and what comes back to it.

    Args:
        broken: layers that contradict themselves, of which nothing is said here.
    """

    def __init__(self, modules: Modules, broken: frozenset[str] = frozenset()) -> None:
        self.modules, self.broken = modules, broken
        self._gathers: dict[str, set[str]] = {}

    @cached_property
    def served(self) -> dict[str, list[Layer]]:
        """By the path of a module with an `in`, the layers in it whose inputs it serves: no other `in` is between."""
        found: dict[str, list[Layer]] = {}
        for path, layer in self.modules.layers.items():
            takes_copies = layer.kind.name == "norm" or (layer.kind.name == "linear" and not layer.cut("weight", "in"))
            if path in self.broken or layer.stated.ins or not takes_copies or not (layer.has_flow or layer.is_cut):
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
            if not all(placed.layout.is_replicated for placed in self.modules.owned.get(path, {}).values()):
                continue  # it works on ShardedTensors, whose gradients are complete
            each = [addends_of(layer) for layer in layers if layer.has_flow]
            found[path] = max(each, key=len, default=())
        return found

    def around(self, path: str) -> tuple[str, Names]:
        """The module around a path whose `in` serves it, and the axes along which that `in` sums gradients."""
        nearest = self.modules.nearest_in(path)
        return nearest or "", self.addends.get(nearest, ()) if nearest is not None else ()

    @cached_property
    def streams(self) -> dict[str, str]:
        """Axes over which some `out` cuts values on a dim that is not the last, with the path of the first."""
        found: dict[str, str] = {}
        for path, stated in self.modules.stated.items():
            for flow in stated.outs.values():
                before = set(cut_axes(flow.before))
                for dim, cut in cuts(flow.after).items():
                    for axis in cut.axes if dim != -1 else ():
                        if axis not in before:
                            found.setdefault(axis, path)
        return found

    def streams_into(self, path: str) -> list[str]:
        """Of these, the axes along which no module around a path gathers what enters it."""
        if not self.streams:
            return []
        parent = path.rpartition(".")[0] if path else None
        gathered = self._gathered(parent) if parent is not None else set()
        return [axis for axis in self.streams if axis not in gathered]

    def _gathered(self, path: str) -> set[str]:
        """The axes along which a module, or one around it, gathers what enters it."""
        missing = list(takewhile(lambda each: each not in self._gathers, (path, *around(path))))
        for each in reversed(missing):  # outermost first, for names may have thousands of segments
            stated = self.modules.stated.get(each)
            flows = stated.ins.values() if stated is not None else ()
            own = {axis for flow in flows for axis in set(cut_axes(flow.before)) - set(cut_axes(flow.after))}
            outer = self._gathers[each.rpartition(".")[0]] if each else set()
            self._gathers[each] = own | outer if own else outer
        return self._gathers[path]
