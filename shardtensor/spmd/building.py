"""`Builder`: makes programs: traces the step, finds what each value is, places collectives, and compiles the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import fx, nn

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.fsdp.api import fully_shard
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.gradient_buckets import Gradient, make_buckets
from shardtensor.fsdp.state import state_of, states_in
from shardtensor.rules.batch import BatchMode, BatchValue
from shardtensor.spmd.arguments import Call, Held, Tree
from shardtensor.spmd.gathers import Unit, gather_units, prefetch, reduce_scatter_gradients
from shardtensor.spmd.gradients import GradientBucketPlan, all_reduce_gradients
from shardtensor.spmd.local_graph import LocalGraph, localize
from shardtensor.spmd.lowering import Segment, eager, empty_outputs, inductor, split_at_steps, without_collectives
from shardtensor.spmd.markers import STEPPED, Node
from shardtensor.spmd.optimizers import shard_states, step_of
from shardtensor.spmd.parallel_mode import DataParallel
from shardtensor.spmd.program import Block, FlatGradient, Gradients, Program
from shardtensor.spmd.sizes import Part
from shardtensor.spmd.tracing import Trace, trace_step


@attrs.frozen(eq=False)
class Built:
    """A program's graph before it was split and compiled, for `explain`."""

    local: LocalGraph
    graph: fx.Graph
    part: Part


class Builder:
    """Makes the programs of one train step.

    Attributes:
        lowered: how many graphs Inductor has compiled.
        last: what was built last.
    """

    def __init__(self, step: Callable[..., Any], mode: DataParallel, backend: str, cache_dir: Path | None) -> None:
        self.step, self.mode, self.backend, self.cache_dir = step, mode, backend, cache_dir
        self.name = f"compile({getattr(step, '__name__', type(step).__name__)})"
        self.text = f"{attrs.evolve(mode, mesh=None)}, backend={backend}"
        self.lowered = 0
        self.last: Any = None
        self._steps: dict[int, Callable[[], Any]] = {}
        self._is_seeded = False
        self._sent: set[int] = set()

    def samples(self, call: Call) -> int:
        """Return the number of this rank's samples.

        Raises:
            LayoutError: tensors of the batch have different numbers of samples, or none.
        """
        dim = self.mode.input_batch_dim
        sizes = {x.shape[dim] for x in call.tensors if x.dim() > dim}
        least = min(sizes, default=1)
        if not least or any(size % least for size in sizes):
            raise LayoutError(
                "the tensors of the batch have different numbers of samples" if least else "the batch has no samples",
                {"shapes": ", ".join(" x ".join(map(str, x.shape)) or "one number" for x in call.tensors[:8])},
                f"pass as many samples in each; dim {dim} has them, or DataParallel(..., input_batch_dim=d)",
            )
        return least

    def program(self, call: Call, tree: Tree, samples: int, data: DataMesh) -> Program:
        """Return the program for a call. Collective over the data ranks."""
        counts = [int.from_bytes(x, "little") for x in data.whole.exchange(samples.to_bytes(8, "little"))]
        total, start = sum(counts), list(accumulate(counts, initial=0))[data.whole.index]
        part = Part(samples, total, start, len(counts), len(set(counts)) == 1)
        mode = BatchMode(self.mode.reduce_op == "mean", part.is_even)
        fault: ShardTensorError | None = None
        text = ""
        try:
            whole = trace_step(self.step, call, tree.held, self.mode.input_batch_dim, (total, samples))
            doubled = trace_step(self.step, call, tree.held, self.mode.input_batch_dim, (2 * total, samples))
            local = self._localized(call, tree, whole, doubled, part, mode, data)
            text = hashlib.sha256(str(whole.graph.graph).encode()).hexdigest()
        except ShardTensorError as error:
            fault = error
        agree(data.whole, self.name, {"graph": text}, fault)
        if self.mode.seed is not None and not self._is_seeded:
            torch.manual_seed((self.mode.seed * 1_000_003 + data.whole.index) % 2**63)
            self._is_seeded = True
        return self._lowered(call, tree, whole, local, part, mode, data)

    def _localized(
        self, call: Call, tree: Tree, whole: Trace, doubled: Trace, part: Part, mode: BatchMode, data: DataMesh
    ) -> LocalGraph:
        dim = self.mode.input_batch_dim
        inputs = [BatchValue() for _ in tree.held]
        inputs += [BatchValue("sharded", dim) if x.dim() > dim else BatchValue() for x in call.tensors]
        is_sharded = self.mode.parallel_style == "fully_shard"
        return localize(whole, doubled, whole.graph, part, mode, _name_of(data.whole), inputs, is_sharded)

    # -- collectives of parameters and gradients ----------------------------------------------------------------------

    def _lowered(
        self, call: Call, tree: Tree, whole: Trace, local: LocalGraph, part: Part, mode: BatchMode, data: DataMesh
    ) -> Program:
        graph = local.graph
        units: list[Unit] = []
        flats: dict[Node, FlatGradient] = {}
        if self.mode.parallel_style == "fully_shard":
            units = self._units(call, tree, data)
            flats = reduce_scatter_gradients(graph, units, part, mode, _name_of(data.reduce))
            gather_units(graph, units, _name_of(data.shard))
            prefetch(graph)
            tree.record()
        else:
            self._send_values(tree.held, data.whole)
            support = getattr(data.whole, "support", None)
            has_avg = support is None or "avg" in support.ops
            buckets = _buckets(tree.held, data.whole, self.mode.bucket_mib)
            all_reduce_gradients(graph, buckets, part, mode, _name_of(data.whole), has_avg)
        if data.whole.size == 1:
            without_collectives(graph)
        self.last = Built(local, graph, part)
        return _Assembly(self, call, tree, whole, graph, units, flats, data.whole).program()

    @torch.no_grad()
    def _send_values(self, held: Iterable[Held], group: Group) -> None:
        """Make parameters and buffers equal to those of the first rank, once."""
        for each in held if group.size > 1 else ():
            if id(each.tensor) not in self._sent:
                self._sent.add(id(each.tensor))
                group.broadcast(each.tensor.detach())

    def _units(self, call: Call, tree: Tree, data: DataMesh) -> list[Unit]:
        """Fully shard the modules that are not, and return the parameter groups of all."""
        numbers = {id(held.tensor): i for i, held in enumerate(tree.held)}
        for module in tree.roots.values():
            if not any(True for _ in states_in(module)):
                self._send_values([h for h in tree.held], data.whole)
                shard_layers(module, self.mode.mesh)
                groups = [group for _, state in states_in(module) for group in state.param_groups]
                shard_states(call.optimizers, groups)
        found = []
        for module in tree.roots.values():
            for name, state in states_in(module):
                state.compute_flags()
                for group in state.param_groups:
                    params = tuple(numbers[id(param)] for param in group.sharded_params)
                    found.append(Unit(group, params, state.stays_unsharded, name))
        return found

    # -- functions ----------------------------------------------------------------------------------------------------

    def function(
        self, segment: Segment, attributes: nn.Module, inputs: Sequence[torch.Tensor], group: Group
    ) -> Callable[..., Sequence[torch.Tensor]]:
        """Return the function of a part of the graph."""
        if not any(node.op == "call_function" for node in segment.graph.nodes):
            return _nothing
        if self.backend == "eager":
            return eager(segment, attributes, group)
        function, is_new = inductor(segment, attributes, inputs, self.cache_dir)
        self.lowered += is_new
        return function

    def step_of(self, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Callable[[], Any]:
        """Return the function that steps an optimizer; the same in all programs."""
        if id(optimizer) not in self._steps:
            self._steps[id(optimizer)] = step_of(optimizer, names)
        return self._steps[id(optimizer)]


class _Assembly:
    """Numbers the values that parts of the graph exchange, and compiles the parts."""

    def __init__(
        self,
        builder: Builder,
        call: Call,
        tree: Tree,
        whole: Trace,
        graph: fx.Graph,
        units: list[Unit],
        flats: dict[Node, FlatGradient],
        group: Group,
    ) -> None:
        self.builder, self.call, self.tree, self.whole, self.graph = builder, call, tree, whole, graph
        self.units, self.flats, self.group = units, flats, group
        self.segments = split_at_steps(graph, list(flats))
        inside = {i for unit in units for i in unit.params}
        held = [h.tensor for h in tree.held]
        self.static: dict[int, Any] = {i: x for i, x in enumerate(held) if i not in inside}
        self.batch, self.shards = len(held), len(held) + len(call.tensors)
        placed = [*self.static, *range(self.batch, self.shards + len(units))]
        self.slot = dict(zip((n for n in graph.nodes if n.op == "placeholder"), self._in_order(placed), strict=True))
        for segment in self.segments:
            for node in segment.outputs:
                self.slot.setdefault(node, self.shards + len(units) + len(self.slot))

    def _in_order(self, placed: list[int]) -> list[int]:
        """Inputs of the graph: held tensors outside of units, the batch, shards."""
        return placed

    def program(self) -> Program:
        values: dict[int, Any] = dict(self.static)
        values |= {self.batch + i: x for i, x in enumerate(self.call.tensors)}
        values |= {self.shards + i: unit.group.shard for i, unit in enumerate(self.units)}
        names = {id(h.tensor): h.name for h in self.tree.held}
        blocks = []
        for segment in self.segments:
            inputs = [values[self.slot[x]] for x in segment.inputs]
            function = self.builder.function(segment, self.whole.graph, inputs, self.group)
            if segment is not self.segments[-1]:
                made = empty_outputs(segment, self.whole.graph, inputs)
                values |= {self.slot[x]: empty for x, empty in zip(segment.outputs, made, strict=True)}
            step, grads = None, None
            if segment.step is not None:
                number: Any = segment.step.args[2]
                step = self.builder.step_of(self.call.optimizers[number], names)
                given: Any = segment.step.args[1]
                grads = self._gradients(segment.step.meta["numbers"], given)
            places = [self.slot[x] for x in segment.inputs], [self.slot[x] for x in segment.outputs]
            blocks.append(Block(function, *places, grads, step))
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
            self.whole.adds_to_gradients,
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


def _buckets(held: Sequence[Held], group: Group, bucket_mib: float) -> list[GradientBucketPlan]:
    """Return the buckets of `data_parallel` for these parameters."""
    trained = {i: h for i, h in enumerate(held) if h.is_param and h.tensor.requires_grad}
    gradients = [Gradient(str(i), h.tensor, h.tensor, group, 1.0, h.tensor.dtype) for i, h in trained.items()]
    return [
        GradientBucketPlan(
            tuple(int(g.name) for g in bucket.gradients),
            tuple(g.leaf.numel() for g in bucket.gradients),
            len(bucket.flagged),
        )
        for bucket in make_buckets(gradients, bucket_mib * 2**20)
    ]


def shard_layers(module: nn.Module, mesh: Any) -> None:
    """Fully shard the layers in lists of layers, each as a unit, and then the rest."""
    for child in list(module.modules()):
        if isinstance(child, nn.ModuleList):
            for layer in child:
                if state_of(layer) is None and next(layer.parameters(), None) is not None:
                    fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _name_of(group: Group) -> str:
    process_group: Any = getattr(group, "process_group", None)
    return str(getattr(process_group, "group_name", ""))


def _nothing(*_: torch.Tensor) -> tuple[()]:
    return ()


__all__ = ["STEPPED", "Builder", "Built"]
