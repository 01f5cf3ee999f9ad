"""Passes for fully sharded parameters: each unit is gathered before it is used, and its gradients reduce-scattered."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from shardtensor.comm.group import Group
from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.mesh import ranks_text
from shardtensor.rules.batch import BatchMode
from shardtensor.spmd.gradients import Inserter, are_averaged, gradient_factor, position, rounds
from shardtensor.spmd.markers import STEPPED, Node
from shardtensor.spmd.sizes import BatchPart

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
_VIEWS = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.unsqueeze.default,
    aten.detach.default,
    aten.alias.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.expand.default,
    aten._to_copy.default,
}
"""Made again from gathered parameters, not kept: most are views."""


@attrs.frozen
class FlatGradient:
    """This rank's part of the gradients of a unit: the unit's number, and which of its parameters have one."""

    unit: int
    used: tuple[bool, ...]


@attrs.frozen(eq=False)
class Unit:
    """A parameter group of `fully_shard`, and the numbers of its parameters among the inputs of the graph.

    Attributes:
        keeps: whether it stays gathered from forward to backward.
    """

    group: ParamGroup
    params: tuple[int, ...]
    keeps: bool
    name: str


def group_name(group: Group) -> str:
    """Return torch's name of a group; of another one, its ranks."""
    name = getattr(getattr(group, "process_group", None), "group_name", None)
    return f"ranks {ranks_text(group.ranks)}" if name is None else str(name)


def gather_params(graph: fx.Graph, units: Sequence[Unit]) -> None:
    """Replace the inputs for parameters of units by one flat shard for each unit, and gather these before use.

    Forward, backward and what follows an optimizer step gather anew, unless the unit stays gathered. The new inputs
    come last, in the order of units.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    phases = _phases(graph)
    shards = []
    for number in range(len(units)):
        with graph.inserting_before(first):
            shards.append(graph.placeholder(f"shard_{number}"))
    for unit, shard in zip(units, shards, strict=True):
        _Gathers(graph, unit, [inputs[i] for i in unit.params], shard, phases).run()
    for unit in units:
        for i in unit.params:
            graph.erase_node(inputs[i])


class _Gathers:
    """The gathers of one unit."""

    def __init__(
        self,
        graph: fx.Graph,
        unit: Unit,
        params: list[Node],
        shard: Node,
        phases: Mapping[Node, Any],
    ) -> None:
        self.graph, self.unit, self.params, self.shard, self.phases = graph, unit, params, shard, phases
        self.views: set[Node] = set()
        self.wholes: dict[Any, list[Node]] = {}
        self.made: dict[tuple[Any, Node], Node] = {}

    def run(self) -> None:
        uses = self._uses()
        place = position(self.graph)
        uses.sort(key=lambda use: place[use[0]])
        for user, source in uses:
            phase = self._phase(user)
            version = self._version(source, phase, user)
            user.replace_input_with(source, version)
        for node in sorted(self.views, key=lambda node: -place[node]):
            if not node.users:
                self.graph.erase_node(node)

    def _phase(self, node: Node) -> Any:
        segment, is_backward = self.phases[node]
        return segment, is_backward and not self.unit.keeps

    def _uses(self) -> list[tuple[Node, Node]]:
        """Return what computes with parameters or views of them, and with which."""
        found, left = [], list(self.params)
        seen = set(left)
        while left:
            source = left.pop()
            for user in list(source.users):
                if user.target is STEPPED:
                    continue
                if user.target in _VIEWS:
                    if user not in seen:
                        seen.add(user)
                        self.views.add(user)
                        left.append(user)
                    continue
                found.append((user, source))
        return found

    def _version(self, node: Node, phase: Any, user: Node) -> Node:
        """Return a parameter, or a view of one, in a phase; it is made before `user`, the first that needs it."""
        key = phase, node
        if key not in self.made:
            if node in self.params:
                self.made[key] = self._gathered(phase, user)[self.params.index(node)]
            else:
                source = self._version(node.args[0], phase, user)
                with self.graph.inserting_before(user):
                    made = self.graph.node_copy(node, lambda x: source if x is node.args[0] else x)
                self.made[key] = made
        return self.made[key]

    def _gathered(self, phase: Any, user: Node) -> list[Node]:
        if phase not in self.wholes:
            self.wholes[phase] = self._gather(user, self.phases[user][1])
        return self.wholes[phase]

    def _gather(self, user: Node, is_backward: bool) -> list[Node]:
        group = self.unit.group
        made = Inserter(self.graph, user.prev, {"where": "", "backward": is_backward})
        part: Any = self.shard
        if group.compute_dtype != group.dtype:
            part = made.call(aten._to_copy.default, part, dtype=group.compute_dtype)
        ranks = group.data_mesh.shard.size
        if ranks > 1:
            started = made.call(c10d.all_gather_into_tensor.default, part, ranks, group_name(group.data_mesh.shard))
            started.meta["unit"] = self.unit.name
            part = made.call(c10d.wait_tensor.default, started)
        sizes = group.bucket.ranges.all_cuts()
        pieces = made.call(aten.split_with_sizes.default, part, sizes)
        found = []
        for i, (info, shape) in enumerate(zip(group.params_info, group.shapes, strict=True)):
            piece = made.call(operator.getitem, pieces, 2 * i + 1)
            dim = info.placement.dim
            if dim is None:
                found.append(made.call(aten.view.default, piece, list(shape)))
                continue
            front = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
            stored = made.call(aten.view.default, piece, front)
            found.append(made.call(aten.permute.default, stored, _moved(dim, len(shape))))
        return found


def _moved(dim: int, ndim: int) -> list[int]:
    """Return the order of dims that moves the first to `dim`."""
    order = list(range(1, ndim))
    order.insert(dim, 0)
    return order


def _phases(graph: fx.Graph) -> dict[Node, tuple[int, bool]]:
    """Return for each node how many optimizer steps are before it, and whether it is part of a backward."""
    found, steps = {}, 0
    for node in graph.nodes:
        found[node] = steps, bool((node.meta.get("custom") or {}).get("backward"))
        steps += node.target is STEPPED
    return found


def prefetch(graph: fx.Graph) -> None:
    """Start each gather one gather earlier: while one unit computes, the next one is gathered."""
    gathers = [node for node in graph.nodes if "unit" in node.meta]
    place = position(graph)
    steps = [place[node] for node in graph.nodes if node.target is STEPPED]
    for earlier, later in itertools.pairwise(gathers):
        if any(place[earlier] < step < place[later] for step in steps):
            continue
        source = later.args[0]
        behind = next(iter(earlier.users))  # its wait
        for node in ([source] if source.op != "placeholder" else []) + [later]:
            behind.append(node)
            behind = node


def reduce_scatter_gradients(
    graph: fx.Graph, units: Sequence[Unit], part: BatchPart, mode: BatchMode
) -> dict[Node, FlatGradient]:
    """Replace gradients by this rank's flat shards of their averages, as soon as those of a unit are computed.

    Returns:
        the nodes of flat gradients.
    """
    found: dict[Node, FlatGradient] = {}
    for markers in rounds(graph):
        by_number = {marker.args[1]: marker for marker in markers}
        place = position(graph)
        for number, unit in enumerate(units):
            present = [by_number.get(i) for i in unit.params]
            if any(marker is not None for marker in present):
                flat = _reduce_scattered(graph, unit, present, place, part, mode)
                found[flat] = FlatGradient(number, tuple(marker is not None for marker in present))
            for marker in present:
                if marker is not None:
                    graph.erase_node(marker)
    return found


def _reduce_scattered(
    graph: fx.Graph,
    unit: Unit,
    markers: Sequence[Node | None],
    place: Mapping[Node, int],
    part: BatchPart,
    mode: BatchMode,
) -> Node:
    group = unit.group
    there = [marker for marker in markers if marker is not None]
    last = max((marker.args[0] for marker in there), key=place.__getitem__)
    made = Inserter(graph, last)
    factors = [gradient_factor(marker.meta["grad"], part, mode) for marker in there]
    averages = are_averaged([marker.meta["grad"] for marker in there], part, mode)
    dtype = group.gradients.reduce_dtype
    device = there[0].meta["val"].device
    pieces: list[Any] = []
    sizes = group.bucket.ranges.all_cuts()
    left = iter(factors)
    for i, (info, marker) in enumerate(zip(group.params_info, markers, strict=True)):
        if sizes[2 * i]:
            pieces.append(made.call(aten.zeros.default, [sizes[2 * i]], dtype=dtype, device=device))
        if marker is None:
            pieces.append(made.call(aten.zeros.default, [sizes[2 * i + 1]], dtype=dtype, device=device))
            continue
        grad, factor = marker.args[0], next(left)
        if info.placement.dim is not None:
            ndim = len(group.shapes[i])
            order = [info.placement.dim, *(d for d in range(ndim) if d != info.placement.dim)]
            grad = made.call(aten.permute.default, grad, order)
        grad = made.call(aten.reshape.default, grad, [-1])
        if marker.meta["val"].dtype != dtype:
            grad = made.call(aten._to_copy.default, grad, dtype=dtype)
        pieces.append(grad if averages or factor == 1 else made.call(aten.mul.Tensor, grad, float(factor)))
    if sizes[-1]:
        pieces.append(made.call(aten.zeros.default, [sizes[-1]], dtype=dtype, device=device))
    packed = made.call(aten.cat.default, pieces)
    first = min(there, key=place.__getitem__)
    summed: Any = packed
    if group.data_mesh.shard.size > 1:
        ranks = group.data_mesh.shard.size
        name = group_name(group.data_mesh.reduce)
        summed = made.call(c10d.reduce_scatter_tensor.default, packed, "sum", ranks, name)
    late = Inserter(graph, first.prev)
    if summed is not packed:
        summed = late.call(c10d.wait_tensor.default, summed)
    replicas = group.data_mesh.replicate
    if replicas is not None and replicas.size > 1:
        sent = late.call(c10d.all_reduce.default, summed, "sum", group_name(replicas))
        summed = late.call(c10d.wait_tensor.default, sent)
    scale = 1 / group.gradients.divisor if averages else 1.0
    if scale != 1:
        summed = late.call(aten.mul.Tensor, summed, scale)
    if dtype != group.gradients.dtype:
        summed = late.call(aten._to_copy.default, summed, dtype=group.gradients.dtype)
    _use_parts(unit, markers, summed, late)
    return summed


def _use_parts(unit: Unit, markers: Sequence[Node | None], flat: Node, made: Inserter) -> None:
    """Let what reads a gradient read its part of the flat shard."""
    own = unit.group.bucket.ranges.cuts(unit.group.bucket.index)
    parts = made.call(aten.split_with_sizes.default, flat, own)
    for i, marker in enumerate(markers):
        if marker is not None:
            marker.replace_all_uses_with(made.getitem(parts, 2 * i + 1))
