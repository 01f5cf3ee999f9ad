"""`Assembly`: a program from the graph of a rank: its parts, compiled, and where each finds its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from shardtensor.spmd.arguments import StepArguments, Tree
from shardtensor.spmd.gathers import FlatGradient, Unit
from shardtensor.spmd.lowering import Function, GraphSegment, empty_outputs, split_at_steps
from shardtensor.spmd.markers import Node
from shardtensor.spmd.optimizers import step_of
from shardtensor.spmd.program import Gradients, Program, ProgramPart
from shardtensor.spmd.tracing import Trace
from shardtensor.tensor.sharded_tensor import local_of


class Assembly:
    """Numbers the values that parts of a graph exchange, and compiles the parts.

    Args:
        compiled: returns the function of a part; it takes the graph's attributes, and tensors like the inputs.
        whole: the trace that the graph was made from.
        units, flats: fully sharded parameters, and the nodes of their gradients.
    """

    def __init__(
        self,
        compiled: Callable[[GraphSegment, nn.Module, Sequence[torch.Tensor]], Function],
        call: StepArguments,
        tree: Tree,
        whole: Trace,
        graph: fx.Graph,
        units: list[Unit],
        flats: dict[Node, FlatGradient],
    ) -> None:
        self.compiled, self.call, self.tree, self.whole, self.graph = compiled, call, tree, whole, graph
        self.units, self.flats = units, flats
        self.segments = split_at_steps(graph, list(flats))
        inside = {i for unit in units for i in unit.params}
        held = [h.tensor for h in tree.held]
        self.static: dict[int, Any] = {i: local_of(x) for i, x in enumerate(held) if i not in inside}
        self.batch, self.shards = len(held), len(held) + len(call.tensors)
        placed = [*self.static, *range(self.batch, self.shards + len(units))]
        self.slot = dict(zip((n for n in graph.nodes if n.op == "placeholder"), placed, strict=True))
        for segment in self.segments:
            for node in segment.outputs:
                self.slot.setdefault(node, self.shards + len(units) + len(self.slot))

    def program(self) -> Program:
        values: dict[int, Any] = dict(self.static)
        values |= {self.batch + i: x for i, x in enumerate(self.call.tensors)}
        values |= {self.shards + i: unit.group.shard for i, unit in enumerate(self.units)}
        blocks = []
        for segment in self.segments:
            inputs = [values[self.slot[x]] for x in segment.inputs]
            function = self.compiled(segment, self.whole.graph, inputs)
            if segment is not self.segments[-1]:
                made = empty_outputs(segment, self.whole.graph, inputs)
                values |= {self.slot[x]: empty for x, empty in zip(segment.outputs, made, strict=True)}
            step, grads = None, None
            if segment.step is not None:
                number: Any = segment.step.args[2]
                step = step_of(self.call.optimizers[number])
                given: Any = segment.step.args[1]
                grads = self._gradients(segment.step.meta["numbers"], given)
            places = [self.slot[x] for x in segment.inputs], [self.slot[x] for x in segment.outputs]
            blocks.append(ProgramPart(function, *places, grads, step))
        returned: Any = next(node for node in self.graph.nodes if node.op == "output").args[0]
        return Program(
            [h.tensor for h in self.tree.held],
            [i for i, h in enumerate(self.tree.held) if h.is_param],
            self.units,
            self.static,
            (self.batch, self.shards),
            max(self.slot.values(), default=0) + 1,
            blocks,
            self.whole.result,
            [self.slot[x] for x in returned[: self.whole.count]],
            self._gradients(self.whole.grads, returned[self.whole.count :]),
            [i for i in self.whole.adds_to if self.tree.held[i].tensor.requires_grad],
        )

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
