"""`Assembly`: a program from the graph of a rank: its parts, compiled, and where each finds its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from shardtensor.spmd.arguments import StepArguments, Tree
from shardtensor.spmd.comparison import Comparison
from shardtensor.spmd.gathers import FlatGradient, Unit, group_name
from shardtensor.spmd.lowering import Function, eager, empty_outputs
from shardtensor.spmd.markers import Node
from shardtensor.spmd.optimizers import step_of
from shardtensor.spmd.program import Gradients, Program, ProgramPart, ProgramStart
from shardtensor.spmd.segments import GraphSegment, split
from shardtensor.spmd.tracing import Trace
from shardtensor.tensor.sharded_tensor import local_of

MOST_HANDED_OVER = 64 * 2**20
"""Bytes that the part which runs during the comparison may leave: they stay in memory until backward has ended."""


class Assembly:
    """Numbers the values that parts of a graph exchange, and compiles the parts.

    Args:
        compiled: returns the function of a part; it takes the graph's attributes, and tensors like the inputs.
        takes_inputs: whether it needs them; if not, it is given none.
        whole: the trace that the graph was made from.
        units, flats: fully sharded parameters, and the nodes of their gradients.
        comparison: of programs, where ranks compare them.
    """

    def __init__(
        self,
        compiled: Callable[[GraphSegment, nn.Module, Sequence[torch.Tensor]], Function],
        takes_inputs: bool,
        call: StepArguments,
        tree: Tree,
        whole: Trace,
        graph: fx.Graph,
        units: list[Unit],
        flats: dict[Node, FlatGradient],
        comparison: Comparison | None,
    ) -> None:
        self.compiled, self.call, self.tree, self.whole, self.graph = compiled, call, tree, whole, graph
        self.units, self.flats, self.comparison, self.takes_inputs = units, flats, comparison, takes_inputs
        inside = {i for unit in units for i in unit.params}
        held = [h.tensor for h in tree.held]
        self.static: dict[int, Any] = {i: local_of(x) for i, x in enumerate(held) if i not in inside}
        self.batch, self.shards = len(held), len(held) + len(call.tensors)
        given = [*self.static.values(), *call.tensors, *(unit.group.shard for unit in units)]
        # tensors like what nodes return, if they are needed to compile
        self.values: dict[Node, Any] = dict(zip((n for n in graph.nodes if n.op == "placeholder"), given, strict=True))
        self._split(overlaps=True)
        if self.segments.start is not None and takes_inputs:
            for segment in self.segments.start:
                self._keep_outputs(segment)
            handed_over = [self.values[x] for x in self.segments.start[1].outputs]
            if sum(x.numel() * x.element_size() for x in handed_over) > MOST_HANDED_OVER:
                self._split(overlaps=False)

    def _split(self, overlaps: bool) -> None:
        """Split the graph, and number the values that parts exchange behind the inputs."""
        group = None if self.comparison is None else group_name(self.comparison.group)
        self.segments = split(self.graph, list(self.flats), group, overlaps)
        first = self.shards + len(self.units)
        placed = [*self.static, *range(self.batch, first)]
        self.slot = dict(zip((n for n in self.graph.nodes if n.op == "placeholder"), placed, strict=True))
        made = [node for segment in (*(self.segments.start or ()), *self.segments.others) for node in segment.outputs]
        for node in (*made, *(total for _, total in self.segments.sums)):
            self.slot.setdefault(node, first + len(self.slot))

    def _keep_outputs(self, segment: GraphSegment) -> None:
        """Keep tensors like the outputs of a part, to compile those behind it."""
        if not all(x in self.values for x in segment.outputs):  # those of the start are made before it is compiled
            made = empty_outputs(segment, self.whole.graph, [self.values[x] for x in segment.inputs])
            self.values |= dict(zip(segment.outputs, made, strict=True))

    def program(self) -> Program:
        start = None
        if self.segments.start is not None and self.comparison is not None:
            counted = self._part(self.segments.start[0], lambda segment, attributes, _: eager(segment, attributes, {}))
            sums = [(self.slot[part], self.slot[total]) for part, total in self.segments.sums]
            if self.takes_inputs:
                self.values |= {total: self.values[part] for part, total in self.segments.sums}
            local = self._part(self.segments.start[1], self.compiled)
            start = ProgramStart(self.comparison, counted, local, sums)
        blocks = [self._part(segment, self.compiled) for segment in self.segments.others]
        returned: Any = next(node for node in self.graph.nodes if node.op == "output").args[0]
        return Program(
            [h.tensor for h in self.tree.held],
            [i for i, h in enumerate(self.tree.held) if h.is_param],
            self.units,
            self.static,
            (self.batch, self.shards),
            max(self.slot.values(), default=0) + 1,
            start,
            blocks,
            self.whole.result,
            [self.slot[x] for x in returned[: self.whole.count]],
            self._gradients(self.whole.grads, returned[self.whole.count :]),
            [i for i in self.whole.adds_to if self.tree.held[i].tensor.requires_grad],
        )

    def _part(
        self, segment: GraphSegment, compiled: Callable[[GraphSegment, nn.Module, Sequence[torch.Tensor]], Function]
    ) -> ProgramPart:
        inputs = [self.values[x] for x in segment.inputs] if self.takes_inputs else []
        function = compiled(segment, self.whole.graph, inputs)
        if self.takes_inputs and segment is not self.segments.others[-1]:
            self._keep_outputs(segment)
        step, grads = None, None
        if segment.step is not None:
            number: Any = segment.step.args[2]
            step = step_of(self.call.optimizers[number])
            given: Any = segment.step.args[1]
            grads = self._gradients(segment.step.meta["numbers"], given)
        places = [self.slot[x] for x in segment.inputs], [self.slot[x] for x in segment.outputs]
        return ProgramPart(function, *places, grads, step)

    def _gradients(self, numbers: Iterable[int], nodes: Iterable[Node]) -> Gradients:
        """Return where gradients are: in one flat tensor for a unit, if all of its gradients are parts of it."""
        parts: dict[Node, list[tuple[int, Node]]] = {}
        alone = []
        for number, node in zip(numbers, nodes, strict=True):
            flat: Any = node.args[0].args[0] if getattr(node.target, "__name__", "") == "getitem" else None
            if flat in self.flats:
                parts.setdefault(flat, []).append((number, node))
            else:
                alone.append((number, self.slot[node]))
        flats = []
        for flat, found in parts.items():
            gradient = self.flats[flat]
            if len(found) == sum(gradient.used):
                flats.append((self.slot[flat], gradient))
            else:
                alone += [(number, self.slot[node]) for number, node in found]
        return Gradients(tuple(alone), tuple(flats))
