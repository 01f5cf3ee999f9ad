"""The rules of a plan for each module, in axes of its mesh: the known layers, their layouts and their flows.

Axes that are made of others are replaced by these, and axes of size 1, which do nothing, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache

import attrs

from shardtensor.layout.layout import MeshLayout
from shardtensor.layout.pieces import Blocked
from shardtensor.plan.axes import Axes
from shardtensor.plan.findings.finding import Finding
from shardtensor.plan.flows.flow import Flow, as_written
from shardtensor.plan.line import Line, origin_of, style_note
from shardtensor.plan.models.model import LayerKind
from shardtensor.plan.resolved import ModuleFlows, Placed, Resolved
from shardtensor.spec.nodes import Dim, Replicate, Spec
from shardtensor.spec.parts import Cut, Partial

Names = tuple[str, ...]
"""Names of axes of the mesh."""


@attrs.frozen(eq=False)
class StatedFlows:
    """The flows that a plan states for one module, by argument and by result, empty for the first of each."""

    ins: Mapping[str, Flow] = attrs.field(factory=dict)
    outs: Mapping[str, Flow] = attrs.field(factory=dict)
    module_flows: ModuleFlows = attrs.field(factory=ModuleFlows)

    @property
    def out(self) -> Flow | None:
        """Of the first result."""
        return self.outs.get("")

    @property
    def written(self) -> dict[str, Flow]:
        """The flows as written in the plan, by their side: ``in``, ``in mask``, ``out 1``."""
        sides = {"in": self.module_flows.ins, "out": self.module_flows.outs}
        return {f"{side} {name}".strip(): flow for side, flows in sides.items() for name, (flow, _) in flows.items()}

    def line(self, side: str, name: str = "") -> Line | None:
        """Return the line of a flow; None if there is none."""
        return (self.module_flows.ins if side == "in" else self.module_flows.outs).get(name, (None, None))[1]


@attrs.frozen(eq=False)
class Layer:
    """A layer whose arithmetic is known.

    Attributes:
        kind: of layer.
        stated: its flows.
        params: its parameters, by the last part of their names.
        cuts: by a parameter's name and the name of a dim, the axes over which it is cut.
        loose: a parameter whose layout names devices instead of axes; empty if there is none.
        named: returns the plan's names of axes.
    """

    path: str
    kind: LayerKind
    stated: StatedFlows
    params: Mapping[str, Placed]
    cuts: Mapping[tuple[str, str], Names]
    loose: str = ""
    named: Callable[[Iterable[str]], str] = "*".join

    def written(self, side: str) -> str:
        """Return a flow as written in the plan; empty if it has none."""
        found = (self.stated.module_flows.ins if side == "in" else self.stated.module_flows.outs).get("")
        return as_written(found[0]) if found is not None else ""

    def cut(self, name: str, dim: str) -> Names:
        """Return the axes over which a dim of a parameter is sharded."""
        return self.cuts.get((name, dim), ())

    def is_blocked(self, dim: str) -> bool:
        """Whether a dim of the weight is sharded in blocks, so that a rank holds several ranges of it."""
        layout = self.params["weight"].layout
        cut = layout.dims[self.kind.dims["weight"].index(dim)] if isinstance(layout, MeshLayout) else None
        return cut is not None and isinstance(cut.pieces, Blocked)

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold different parts of some parameter."""
        return any(self.cuts.values()) or bool(self.loose)

    @property
    def has_flow(self) -> bool:
        """Whether the plan has flows for it."""
        return bool(self.stated.ins or self.stated.outs)


class Modules:
    """A resolved plan, module by module."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.axes: Axes = resolved.plan.axes
        self._sizes = dict(self.axes.mesh.axes)
        self.stated: dict[str, StatedFlows] = {}
        cached: dict[int, StatedFlows] = {}  # modules with the same rules share it
        for path, module_flows in resolved.modules.items():
            if id(module_flows) not in cached:
                ins = {name: self.flow(flow) for name, (flow, _) in module_flows.ins.items()}
                outs = {name: self.flow(flow) for name, (flow, _) in module_flows.outs.items()}
                cached[id(module_flows)] = StatedFlows(ins, outs, module_flows)
            self.stated[path] = cached[id(module_flows)]

    def computes_on_sharded(self, path: str) -> bool:
        """Whether a module's code computes on ShardedTensors: it has sharded parameters, and no hook that may replace
        these by local slices."""
        stated = self.stated.get(path)
        if stated is not None and stated.module_flows.uses:
            return False
        return not all(placed.layout.is_replicated for placed in self.owned.get(path, {}).values())

    # -- in the axes of the mesh --------------------------------------------------------------------------------------

    def leaves(self, names: Iterable[str]) -> Names:
        """Return the mesh axes of some axes, without those of size 1."""
        return tuple(leaf for leaf in self.axes.leaves(names) if self._sizes.get(leaf, 2) > 1)

    def flow(self, flow: Flow) -> Flow:
        """Return a flow in the axes of the mesh."""
        return Flow(self.spec(flow.before), self.spec(flow.after), self.leaves(flow.partials), flow.declares_grad)

    def spec(self, spec: Spec) -> Spec:
        """Return the layout of a value in the axes of the mesh."""
        dims: list[Dim] = []
        for dim in spec.dims:
            axes = self.leaves(dim.axes) if isinstance(dim, Cut) else ()
            dims.append((attrs.evolve(dim, axes=axes) if axes else None) if isinstance(dim, Cut) else dim)
        partial = tuple(Partial(axes, part.op) for part in spec.partial_parts if (axes := self.leaves(part.axes)))
        bare = not any(isinstance(dim, Cut) for dim in dims)
        return Spec.of(() if bare else tuple(dims), (), None, None, partial)

    def named(self, leaves: Iterable[str]) -> str:
        """Return the plan's names of axes."""
        return "*".join(self.axes.named(leaves))

    def times(self, leaves: Iterable[str]) -> int:
        """Return the number of ranks along some axes."""
        return math.prod(self._sizes[leaf] for leaf in dict.fromkeys(leaves))

    @cached_property
    def data(self) -> Names:
        """The axes along which samples differ."""
        return tuple(axis for axis in self.axes.mesh.names if axis in self.leaves(self.axes.data))

    # -- layers -------------------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """The known layers, by their path."""
        return {path: layer for path in self.owned if (layer := self._layer(path)) is not None}

    @cached_property
    def owned(self) -> dict[str, dict[str, Placed]]:
        """The parameters that each module owns, by the last part of their names, in the order of the model."""
        found: dict[str, dict[str, Placed]] = {}
        for name, placed in self.resolved.tensors.items():
            if not placed.tensor.is_buffer:
                path, _, leaf = name.rpartition(".")
                found.setdefault(path, {})[leaf] = placed
        return found

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each module in the order of the model."""
        return {path: i for i, path in enumerate(self.resolved.model.paths)}

    def _layer(self, path: str) -> Layer | None:
        kind = self.resolved.model.kind(path)
        params = self.owned[path]
        if kind is None or kind.name == "conv" or "weight" not in params:
            return None
        cuts: dict[tuple[str, str], Names] = {}
        loose = ""
        names, sizes = self.axes.mesh.names, self.axes.mesh.sizes
        for name, placed in params.items():
            dims, layout = kind.dims.get(name), placed.layout
            if dims is None or len(dims) != len(layout.shape):
                continue
            if not isinstance(layout, MeshLayout) or len(layout.grid) != len(sizes):
                loose = name
                continue
            for dim, cut in zip(dims, layout.dims, strict=True):
                if cut is not None:
                    cuts[name, dim] = tuple(names[i] for i in cut.axes if layout.grid[i] > 1)
        return Layer(path, kind, self.stated.get(path, _SILENT), params, cuts, loose, self.named)

    # -- modules around modules ---------------------------------------------------------------------------------------

    def nearest_in(self, path: str) -> str | None:
        """Return the nearest module around a path that has an `in`."""
        return next((above for above in around(path) if above in self.stated and self.stated[above].ins), None)


@lru_cache(maxsize=1 << 16)
def around(path: str) -> tuple[str, ...]:
    """Return the paths of the modules around a path, innermost first; the root is the empty one.

    Example:
        >>> around("layers.0.mlp")
        ('layers.0', 'layers', '')
    """
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return tuple(found)


def is_inside(path: str, above: str) -> bool:
    """Whether a module is inside another."""
    return path != above and (not above or path.startswith(f"{above}."))


def flow_finding(
    code: str, fault: str, line: Line | None, why: str, fix: str, path: str, what: str = "flow"
) -> Finding:
    """Return a finding at the rule of a module; a note names the line of the style that made this `what`."""
    origin = origin_of(line)
    return Finding(code, fault, origin, why, fix, style_note(origin, what) if what else (), path)


_SILENT = StatedFlows()

REPLICATE = Flow(Replicate(), Replicate())
