"""`CompiledStep`: traces, analyses and compiles a train step at its first call, and runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, ShardTensorError, StaleParameterError
from shardtensor.fsdp.api import fully_shard
from shardtensor.fsdp.data_mesh import DataAxes, DataMesh
from shardtensor.fsdp.gradient_buckets import Gradient, make_buckets
from shardtensor.fsdp.state import state_of, states_in
from shardtensor.rules.batch import REPLICATED, SHARDED, BatchMode, BatchValue
from shardtensor.spmd.arguments import Arguments
from shardtensor.spmd.gathers import Unit, gather_units, prefetch, reduce_scatter_gradients
from shardtensor.spmd.gradients import GradientBucketPlan, all_reduce_gradients
from shardtensor.spmd.local_graph import LocalGraph, localize
from shardtensor.spmd.lowering import eager, empty_outputs, inductor, split_at_steps
from shardtensor.spmd.optimizers import shard_states, step_of
from shardtensor.spmd.parallel_mode import DataParallel
from shardtensor.spmd.program import Block, Program, StepCall, described
from shardtensor.spmd.sizes import Part
from shardtensor.spmd.tracing import Trace, trace_step


class CompiledStep:
    """A train step that each rank calls on its part of the batch. Made by `compile`.

    Attributes:
        compiles: how many programs have been made.
    """

    def __init__(
        self, step: Callable[..., Any], mode: DataParallel, backend: str, graphed: bool, cache_dir: Path | None
    ) -> None:
        self.step, self.mode, self.backend, self.graphed, self.cache_dir = step, mode, backend, graphed, cache_dir
        self.compiles = self.lowered = 0
        self._programs: dict[Any, Program] = {}
        self._steps: dict[int, Callable[[], Any]] = {}
        self.graphs: list[LocalGraph] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. All ranks call it."""
        fault: ShardTensorError | None = None
        arguments: Any = None
        try:
            arguments = Arguments.of(args, kwargs)
        except ShardTensorError as error:
            if self._programs:
                raise
            fault = error
        key = None if fault is not None else self._key(arguments)
        program = self._programs.get(key)
        if program is None:
            program = self._compile(arguments, fault)
            self._programs[key] = program
        return program.run(arguments.tensors)

    def _key(self, arguments: Arguments) -> Any:
        return (
            tuple(id(h.tensor) for h in arguments.held),
            tuple(map(id, arguments.optimizers)),
            tuple((x.shape, x.dtype, x.device) for x in arguments.tensors),
            arguments.constants,
            tuple(m.training for root in arguments.modules.values() for m in root.modules()),
            tuple(h.tensor.requires_grad for h in arguments.held),
        )

    # -- compiling ------------------------------------------------------------------------------------------------------

    def _compile(self, arguments: Arguments, fault: ShardTensorError | None) -> Program:
        data = DataMesh.of(self.mode.mesh)
        name = f"compile({getattr(self.step, '__name__', 'step')})"
        own = 0
        if fault is None:
            try:
                own = self._samples(arguments)
            except ShardTensorError as error:
                fault = error
        facts = {} if fault else {"arguments": described(arguments), "mode": str(self.mode), "batch": self._kinds(arguments)}
        agree(data.whole, name, facts, fault)
        sizes = [int.from_bytes(x, "little") for x in data.whole.exchange(own.to_bytes(8, "little"))]
        total, index = sum(sizes), data.whole.index
        start = list(accumulate(sizes, initial=0))[index]
        part = Part(own, total, start, data.whole.size, len(set(sizes)) == 1)
        mode = BatchMode(self.mode.reduce_op == "mean", total)
        try:
            whole = trace_step(self.step, arguments, self.mode.input_batch_dim, (total, own))
            doubled = trace_step(self.step, arguments, self.mode.input_batch_dim, (2 * total, own))
            local = self._localized(arguments, whole, doubled, part, mode, data)
        except ShardTensorError as error:
            fault = error
            local = None
        text = "" if fault else hashlib.sha256(str(whole.graph.graph).encode()).hexdigest()
        agree(data.whole, name, {"graph": text}, fault)
        assert local is not None
        self.compiles += 1
        self.graphs.append(local)
        return self._lowered(arguments, whole, local, part, mode, data, text)

    def _samples(self, arguments: Arguments) -> int:
        """Return the number of this rank's samples."""
        dim = self.mode.input_batch_dim
        sizes = {x.shape[dim] for x in arguments.tensors if x.dim() > dim}
        least = min(sizes, default=1)
        if not least or any(size % least for size in sizes):
            raise LayoutError(
                "the tensors of the batch do not have the same number of samples" if least else "the batch is empty",
                {f"sizes of dim {dim}": ", ".join(map(str, sorted(sizes)))},
                "pass as many samples in each tensor; DataParallel(..., input_batch_dim=d) names the dim that has them",
            )
        return least

    def _kinds(self, arguments: Arguments) -> str:
        dim = self.mode.input_batch_dim
        return "\n".join(
            f"{x.dtype} {[*x.shape[:dim], 'batch', *x.shape[dim + 1 :]] if x.dim() > dim else list(x.shape)}"
            for x in arguments.tensors
        )

    def _localized(
        self, arguments: Arguments, whole: Trace, doubled: Trace, part: Part, mode: BatchMode, data: DataMesh
    ) -> LocalGraph:
        dim = self.mode.input_batch_dim
        inputs = [BatchValue(REPLICATED) for _ in arguments.held]
        inputs += [BatchValue(SHARDED, dim) if x.dim() > dim else BatchValue() for x in arguments.tensors]
        is_sharded = self.mode.parallel_style == "fully_shard"
        return localize(whole, doubled, whole.graph, part, mode, _name_of(data.whole), inputs, is_sharded)

    def _lowered(
        self,
        arguments: Arguments,
        whole: Trace,
        local: LocalGraph,
        part: Part,
        mode: BatchMode,
        data: DataMesh,
        digest: str,
    ) -> Program:
        graph, units = local.graph, []
        rounds: list[Any] = []
        if self.mode.parallel_style == "fully_shard":
            units = self._units(arguments, data)
            rounds = reduce_scatter_gradients(graph, units, part, mode, _name_of(data.reduce))
            gather_units(graph, units, _name_of(data.shard))
            prefetch(graph)
        else:
            self._broadcast(arguments, data.whole)
            buckets = self._buckets(arguments, data)
            has_avg = "avg" in getattr(getattr(data.whole, "support", None), "ops", ("avg",))
            all_reduce_gradients(graph, buckets, part, mode, _name_of(data.whole), has_avg)
        in_unit = [False] * len(arguments.held)
        for unit in units:
            for i in unit.params:
                in_unit[i] = True
        flats = [node for own in rounds for _, node, _ in own]
        segments = split_at_steps(graph, flats)
        return self._program(arguments, whole, graph, segments, units, in_unit, rounds, data.whole, digest)

    def _program(
        self,
        arguments: Arguments,
        whole: Trace,
        graph: fx.Graph,
        segments: list[Any],
        units: list[Unit],
        in_unit: list[bool],
        rounds: list[Any],
        group: Group,
        digest: str,
    ) -> Program:
        held = [h.tensor for h in arguments.held]
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        slot: dict[fx.Node, int] = {}
        plain = iter([i for i, inside in enumerate(in_unit) if not inside])
        batch, first_shard = len(held), len(held) + len(arguments.tensors)
        for node in placeholders[: len(held) - sum(in_unit)]:
            slot[node] = next(plain)
        for k, node in enumerate(placeholders[len(held) - sum(in_unit) :]):
            slot[node] = batch + k
        for segment in segments:
            for node in segment.outputs:
                slot.setdefault(node, first_shard + len(units) + len(slot))
        count = max(slot.values(), default=0) + 1
        numbers = {id(tensor): i for i, tensor in enumerate(held)}
        names = {id(h.tensor): h.name for h in arguments.held}
        output = next(node for node in graph.nodes if node.op == "output").args[0]
        values: dict[int, Any] = dict(enumerate(held))
        values.update({batch + i: x for i, x in enumerate(arguments.tensors)})
        values.update({first_shard + i: unit.group.shard for i, unit in enumerate(units)})
        blocks = []
        for segment in segments:
            function: Any
            if not segment.outputs and not any(n.op == "call_function" for n in segment.graph.nodes):
                function = _nothing
            elif self.backend == "eager":
                function = eager(segment, whole.graph, group)
            else:
                inputs = [values[slot[x]] for x in segment.inputs]
                if segment is not segments[-1]:
                    values.update(zip((slot[x] for x in segment.outputs), empty_outputs(segment, whole.graph, inputs)))
                key = hashlib.sha256(f"{digest} {segment.graph}".encode()).hexdigest()
                function, is_new = inductor(segment, whole.graph, inputs, self.cache_dir, key)
                self.lowered += is_new
            step = None
            if segment.step is not None:
                number = segment.step.args[2]
                optimizer = arguments.optimizers[number]
                if id(optimizer) not in self._steps:
                    self._steps[id(optimizer)] = step_of(optimizer, names)
                listed = [p for g in optimizer.param_groups for p in g["params"]]
                step = self._step_call(segment.step, listed, numbers, slot, rounds, units, self._steps[id(optimizer)])
            blocks.append(
                Block(function, [slot[x] for x in segment.inputs], [slot[x] for x in segment.outputs], step)
            )
        outputs = [slot[x] for x in output[: whole.count]]
        pairs = list(zip(whole.grads, output[whole.count :], strict=True))
        grads, flats = self._split_grads(pairs, slot, rounds, units)
        trained = [i for i, h in enumerate(arguments.held) if h.is_param]
        return Program(
            held, in_unit, units, batch, first_shard, blocks, count, whole.result, outputs, grads, flats, trained
        )

    def _step_call(
        self, node: fx.Node, params: Any, numbers: Any, slot: Any, rounds: Any, units: Any, step: Callable[[], Any]
    ) -> StepCall:
        grads: Any = node.args[1]
        pairs = list(zip(node.meta["numbers"], grads, strict=True))
        found, flats = self._split_grads(pairs, slot, rounds, units)
        return StepCall(step, found, flats)

    def _split_grads(self, pairs: Any, slot: Any, rounds: Any, units: Any) -> tuple[Any, Any]:
        """Separate gradients that are all parts of a flat one."""
        flat_of: dict[fx.Node, tuple[int, fx.Node, list[bool]]] = {}
        for own in rounds:
            for entry in own:
                flat_of[entry[1]] = entry
        by_flat: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
        alone = []
        for number, node in pairs:
            source = node.args[0].args[0] if str(node.target).endswith("getitem>") or node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem" else None
            if source in flat_of:
                by_flat.setdefault(source, []).append((number, node))
            else:
                alone.append((number, slot[node]))
        flats = []
        for source, found in by_flat.items():
            number, _, used = flat_of[source]
            if len(found) == sum(used):
                flats.append((number, slot[source], used))
            else:
                alone += [(i, slot[node]) for i, node in found]
        return alone, flats

    # -- parameters -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _broadcast(self, arguments: Arguments, group: Group) -> None:
        if group.size > 1 and not self._programs:
            for held in arguments.held:
                group.broadcast(held.tensor.detach())

    def _buckets(self, arguments: Arguments, data: DataMesh) -> list[GradientBucketPlan]:
        """Return the buckets of `data_parallel` for these parameters."""
        del data
        group = DataMesh.of(self.mode.mesh).whole
        gradients, numbers = [], {}
        for i, held in enumerate(arguments.held):
            if held.is_param and held.tensor.requires_grad:
                gradients.append(Gradient(held.name, held.tensor, held.tensor, group, 1.0, held.tensor.dtype))
                numbers[held.name] = i
        return [
            GradientBucketPlan(
                tuple(numbers[g.name] for g in bucket.gradients),
                tuple(g.leaf.numel() for g in bucket.gradients),
                len(bucket.flagged),
            )
            for bucket in make_buckets(gradients, self.mode.bucket_mib * 2**20)
        ]

    def _units(self, arguments: Arguments, data: DataMesh) -> list[Unit]:
        before = {id(h.tensor): i for i, h in enumerate(arguments.held)}
        for module in arguments.modules.values():
            if not any(True for _ in states_in(module)):
                _shard_layers(module, self.mode.mesh)
                groups = [group for _, state in states_in(module) for group in state.param_groups]
                shard_states(arguments.optimizers, groups)
        found = []
        for module in arguments.modules.values():
            for name, state in states_in(module):
                state.compute_flags()
                for group in state.param_groups:
                    params = tuple(before[id(param)] for param in group.sharded_params)
                    found.append(Unit(group, params, state.stays_unsharded, name))
        return found


def _shard_layers(module: nn.Module, mesh: Any) -> None:
    """Fully shard the layers of lists of layers, and then the rest."""
    for child in list(module.modules()):
        if isinstance(child, nn.ModuleList):
            for layer in child:
                if state_of(layer) is None and any(True for _ in layer.parameters()):
                    fully_shard(layer, mesh=mesh)
    if state_of(module) is None:
        fully_shard(module, mesh=mesh)


def _name_of(group: Group) -> str:
    process_group: Any = getattr(group, "process_group", None)
    return str(getattr(process_group, "group_name", ""))  # simulated groups have none


def _nothing(*_: torch.Tensor) -> tuple[()]:
    return ()
