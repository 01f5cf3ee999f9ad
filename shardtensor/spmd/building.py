"""`Builder`: makes programs: traces the step, finds what each value is, places collectives, and compiles the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import fx, nn

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group, group_along
from shardtensor.comm.process_group import as_group
from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.fsdp.api import fully_shard
from shardtensor.fsdp.data_mesh import DataMesh
from shardtensor.fsdp.gradient_buckets import Gradient, make_buckets
from shardtensor.fsdp.state import state_of, states_in
from shardtensor.parallel.shard_module import PlanLike, job_of, shard_module
from shardtensor.rules.batch import BatchMode, BatchValue
from shardtensor.spmd.arguments import Held, StepArguments, Tree
from shardtensor.spmd.assembly import Assembly
from shardtensor.spmd.comparison import Comparison, compares_programs
from shardtensor.spmd.explain import Built
from shardtensor.spmd.gathers import FlatGradient, Unit, gather_params, group_name, prefetch, reduce_scatter_gradients
from shardtensor.spmd.gradients import GradientBucketPlan, all_reduce_gradients
from shardtensor.spmd.local_graph import LocalGraph, localize
from shardtensor.spmd.lowering import (
    eager,
    inductor,
    without_collectives,
)
from shardtensor.spmd.markers import Node
from shardtensor.spmd.optimizers import shard_states
from shardtensor.spmd.parallel_mode import DataParallel
from shardtensor.spmd.program import Program
from shardtensor.spmd.segments import GraphSegment, drop_unused, start_early
from shardtensor.spmd.sizes import BatchPart
from shardtensor.spmd.tracing import Trace, trace_train_step
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_of


class Builder:
    """Makes the programs of one train step.

    Attributes:
        lowered: how many graphs Inductor has compiled.
        last: what was built last.
    """

    def __init__(
        self, step: Callable[..., Any], mode: DataParallel | PlanLike, backend: str, cache_dir: Path | None
    ) -> None:
        self.step, self.backend, self.cache_dir = step, backend, cache_dir
        self.mode = mode if isinstance(mode, DataParallel) else DataParallel()
        self._plan: PlanLike | None = None if isinstance(mode, DataParallel) else mode
        self.name = f"compile({getattr(step, '__name__', type(step).__name__)})"
        self.text = f"{attrs.evolve(self.mode, mesh=None)}, backend={backend}"
        self.lowered = 0
        self.last: Built | None = None
        self._is_seeded = False
        self._sent: set[int] = set()  # ids of tensors that all ranks hold alike

    def apply_plan(self, call: StepArguments) -> None:
        """Shard the module as the plan says, if the mode is a plan; the data axes of its mesh are the data ranks.

        Collective, once. Raises the errors of `shard_module`, and LayoutError if there are several modules.
        """
        if self._plan is None:
            return
        if len(call.modules) != 1:
            raise LayoutError(
                f"a plan is for one module, and the train step was called with {len(call.modules)}",
                fix="call shard_module(module, plan) for each, and pass parallel_mode=DataParallel(mesh=...)",
            )
        job = job_of(call.modules[0], self._plan, as_group(None))
        shard_module(call.modules[0], self._plan)
        self._plan = None  # done; after an error the next call tries again
        shard_states(call.optimizers)
        data = job.fsdp_config.data if job.fsdp_config is not None else ()
        self.mode = DataParallel(mesh=group_along(job.group, data) if data else job.group.subgroup([job.group.rank]))

    def samples(self, call: StepArguments) -> int:
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

    def check(self, tree: Tree, data: DataMesh) -> None:
        """Raise LayoutError if data ranks have different parts of a parameter that is in no unit: experts."""
        for held in tree.held:
            x = held.tensor
            if not isinstance(x, ShardedTensor) or x._param_group is not None or x._layout.is_replicated:
                continue
            if len(set(x._group.ranks) & set(data.whole.ranks)) > 1:
                raise LayoutError(
                    f"`{held.name}` is cut along the data axis, so each rank has gradients for all ranks' samples",
                    {"spec": str(x.sharding_spec()), "data ranks": ", ".join(map(str, data.whole.ranks))},
                    "train with data_parallel, which knows such parameters, without compile",
                )

    def program(self, call: StepArguments, tree: Tree, samples: int, data: DataMesh) -> Program:
        """Return the program for a call. Collective over the data ranks."""
        counts = [int.from_bytes(x, "little") for x in data.whole.exchange(samples.to_bytes(8, "little"))]
        total, start = sum(counts), list(accumulate(counts, initial=0))[data.whole.index]
        part = BatchPart(samples, total, start, len(counts), len(set(counts)) == 1)
        mode = BatchMode(self.mode.reduce_op == "mean", total)
        fault: ShardTensorError | None = None
        text = ""
        try:
            whole = trace_train_step(self.step, call, tree.held, self.mode.input_batch_dim, (total, samples))
            doubled = trace_train_step(self.step, call, tree.held, self.mode.input_batch_dim, (2 * total, samples))
            local = self._localized(call, tree, whole, doubled, part, mode, data)
            text = hashlib.sha256(_text(whole.graph.graph).encode()).hexdigest()
        except ShardTensorError as error:
            fault = error
        agree(data.whole, self.name, {"graph": text}, fault)
        if self.mode.seed is not None and not self._is_seeded:
            torch.manual_seed((self.mode.seed * 1_000_003 + data.whole.index) % 2**63)
            self._is_seeded = True
        digest = hashlib.sha256(f"{text} {counts}".encode()).digest()
        return self._lowered(call, tree, whole, local, part, mode, data, int.from_bytes(digest[:7], "little"))

    def _localized(
        self,
        call: StepArguments,
        tree: Tree,
        whole: Trace,
        doubled: Trace,
        part: BatchPart,
        mode: BatchMode,
        data: DataMesh,
    ) -> LocalGraph:
        dim = self.mode.input_batch_dim
        inputs = [BatchValue() for _ in tree.held]
        inputs += [BatchValue("sharded", dim) if x.dim() > dim else BatchValue() for x in call.tensors]
        return localize(whole, doubled, part, mode, group_name(data.whole), inputs, self._sharded(tree))

    def _sharded(self, tree: Tree) -> set[int]:
        """Return the numbers of parameters that are fully sharded, or will be."""
        groups = [group for root in tree.roots.values() for _, state in states_in(root) for group in state.param_groups]
        if groups or self.mode.parallel_style == "replicate":
            inside = {id(param) for group in groups for param in group.sharded_params}
            return {i for i, held in enumerate(tree.held) if id(held.tensor) in inside}
        return {i for i, held in enumerate(tree.held) if held.is_param}

    # -- collectives of parameters and gradients ----------------------------------------------------------------------

    def _lowered(
        self,
        call: StepArguments,
        tree: Tree,
        whole: Trace,
        local: LocalGraph,
        part: BatchPart,
        mode: BatchMode,
        data: DataMesh,
        digest: int,
    ) -> Program:
        graph = local.graph
        drop_unused(graph)  # what nothing needs gathers no parameters
        start_early(graph)
        units: list[Unit] = []
        flats: dict[Node, FlatGradient] = {}
        if self._sharded(tree):
            units = self._units(call, tree)
            flats = reduce_scatter_gradients(graph, units, part, mode)
            gather_params(graph, units)
            prefetch(graph)
            tree.record()
        inside = {i for unit in units for i in unit.params}
        self._send_values([h for i, h in enumerate(tree.held) if i not in inside], data.whole)
        support = getattr(data.whole, "support", None)
        has_avg = support is None or "avg" in support.ops
        buckets = _buckets(tree.held, inside, data.whole, self.mode.bucket_mib)
        all_reduce_gradients(graph, buckets, part, mode, group_name(data.whole), has_avg)
        named = {group_name(group): group for group in _groups(data, units)}
        without_collectives(graph, {name for name, group in named.items() if group.size == 1})
        inputs = [(h.name, local_of(h.tensor)) for i, h in enumerate(tree.held) if i not in inside]
        inputs += [(f"batch {i}", x) for i, x in enumerate(call.tensors)]
        inputs += [(f"shard of {unit.name or 'the root'}", unit.group.shard) for unit in units]
        self.last = Built(local, part, whole.graph, inputs, named)
        comparison = Comparison(data.whole, digest) if compares_programs(data.whole) else None
        function, takes_inputs = partial(self._function, named), self.backend != "eager"
        return Assembly(function, takes_inputs, call, tree, whole, graph, units, flats, comparison).program()

    @torch.no_grad()
    def _send_values(self, held: Iterable[Held], group: Group) -> None:
        """Make parameters and buffers equal to those of the first rank, once."""
        for each in held if group.size > 1 else ():
            if id(each.tensor) not in self._sent:
                self._sent.add(id(each.tensor))
                group.broadcast(local_of(each.tensor).detach())

    def _units(self, call: StepArguments, tree: Tree) -> list[Unit]:
        """Fully shard the modules, unless some are, and return all parameter groups."""
        numbers = {id(held.tensor): i for i, held in enumerate(tree.held)}
        is_sharded = any(True for root in tree.roots.values() for _ in states_in(root))
        for module in () if is_sharded else tree.roots.values():
            if next(module.parameters(), None) is not None:
                self._send_values(tree.held, DataMesh.of(self.mode.mesh).whole)
                shard_layers(module, self.mode.mesh)
                shard_states(call.optimizers)
        found: list[Unit] = []
        for module in tree.roots.values():
            for name, state in states_in(module):
                state.compute_flags()
                for group in state.param_groups:
                    params = tuple(numbers[id(param)] for param in group.sharded_params)
                    found.append(Unit(group, params, state.stays_unsharded, name))
        return _with_kept_units(found, self.mode.keep_mib * 2**20)

    # -- functions ----------------------------------------------------------------------------------------------------

    def _function(
        self, groups: dict[str, Group], segment: GraphSegment, attributes: nn.Module, inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        """Return the function of a part of the graph."""
        if not any(node.op == "call_function" for node in segment.graph.nodes):
            return _nothing
        if self.backend == "eager":
            return eager(segment, attributes, groups)
        function, is_new = inductor(segment, attributes, inputs, self.cache_dir)
        self.lowered += is_new
        return function


def _with_kept_units(units: Sequence[Unit], most: float) -> list[Unit]:
    """Return the units, the last of which stay gathered from forward to backward, in at most so many bytes."""
    found: list[Unit] = []
    for unit in reversed(units):
        size = 0 if unit.keeps else unit.group.unsharded_bytes
        keeps = size <= most
        most -= size if keeps else most  # no unit before one that is gathered again
        found.append(attrs.evolve(unit, keeps=keeps))
    return found[::-1]


def _buckets(held: Sequence[Held], inside: set[int], group: Group, bucket_mib: float) -> list[GradientBucketPlan]:
    """Return the buckets of `data_parallel` for the parameters that are in no unit."""
    trained = {i: h.tensor for i, h in enumerate(held) if h.is_param and h.tensor.requires_grad and i not in inside}
    gradients = [Gradient(str(i), x, local_of(x), group, 1.0, x.dtype) for i, x in trained.items()]
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


def _text(graph: fx.Graph) -> str:
    """Return a graph as text that all data ranks have alike: groups of other axes are numbered."""
    groups: dict[Any, int] = {}
    lines = []
    for node in graph.nodes:
        line = str(node.format_node())
        if "_c10d_functional" in str(node.target) and len(node.args) > 1:
            name = node.args[-1]
            line = line.replace(f", {name})", f", group {groups.setdefault(name, len(groups))})")
        lines.append(line)
    return "\n".join(lines)


def _groups(data: DataMesh, units: Iterable[Unit]) -> Iterable[Group]:
    """Yield the groups that a program sends in."""
    yield data.whole
    for unit in units:
        mesh = unit.group.data_mesh
        yield from (mesh.shard, mesh.reduce, *([] if mesh.replicate is None else [mesh.replicate]))


def _nothing(*_: torch.Tensor) -> tuple[()]:
    return ()
