"""From the parts of a rank's graph to functions, which run them as they are or compiled by Inductor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtensor.comm.group import Group
from shardtensor.spmd.markers import Node
from shardtensor.spmd.segments import GraphSegment

c10d: Any = torch.ops._c10d_functional
Function = Callable[..., Sequence[torch.Tensor]]
_INDUCTOR = {
    "fallback_random": True,  # the random numbers of eager steps
    "reorder_for_locality": False,  # it would start collectives just before the wait for them
}


def eager(segment: GraphSegment, attributes: torch.nn.Module, groups: Mapping[str, Group]) -> Function:
    """Return a function that runs the operations of a segment one by one, with collectives of these groups, by name.

    Collectives of other groups, of layers that are sharded over other axes, are torch's.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(segment.graph, {}))
    for node in reversed(list(graph.nodes)):  # waits first: they look at what they wait for
        if node.target is c10d.wait_tensor.default and _group_name(node.args[0]) in groups:
            node.target = _wait
        elif _group_name(node) in groups:
            function = _all_reduce_in_place if node.meta.get("owned") else _COLLECTIVES[node.target]
            node.target = _bound(function, groups[node.args[-1]])
    return fx.GraphModule(attributes, graph)


def _group_name(node: Node) -> str | None:
    """Return the name of the group that a collective starts on; None for another node."""
    return node.args[-1] if node.target in _COLLECTIVES else None


def _bound(function: Callable[..., Any], group: Group) -> Callable[..., Any]:
    """Return a function of the other arguments; the graph's code names it."""

    def call(*args: Any) -> Any:
        return function(group, *args)

    call.__name__ = call.__qualname__ = function.__name__.strip("_")
    return call


def _all_reduce_in_place(group: Group, x: torch.Tensor, op: str, _: str) -> Any:
    return group.all_reduce_async(x, op)


def _all_reduce(group: Group, x: torch.Tensor, op: str, _: str) -> Any:
    return group.all_reduce_async(x.clone(), op)


def _all_gather(group: Group, x: torch.Tensor, size: int, _: str) -> Any:
    return group.all_gather_into(x.new_empty(x.numel() * size), x)


def _reduce_scatter(group: Group, x: torch.Tensor, op: str, size: int, _: str) -> Any:
    return group.reduce_scatter_into(x.new_empty(x.numel() // size), x)


def _broadcast(group: Group, x: torch.Tensor, source: int, _: str) -> Any:
    return group.broadcast_async(x.clone(), source)


def _wait(pending: Any) -> torch.Tensor:
    result: torch.Tensor = pending.wait()
    return result


_COLLECTIVES: dict[Any, Callable[..., Any]] = {
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.broadcast.default: _broadcast,
}


def empty_outputs(
    segment: GraphSegment, attributes: torch.nn.Module, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return tensors like the outputs of a segment, with undefined values: the compiler reads sizes and strides."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
        made = fx.Interpreter(fx.GraphModule(attributes, segment.graph)).run(*fakes)
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in made]


def without_collectives(graph: fx.Graph, names: Set[str]) -> None:
    """Erase the collectives of groups of one rank: each returns its operand."""
    for node in list(graph.nodes):
        sent = node.args[0] if node.target is c10d.wait_tensor.default else None
        if sent is not None and _group_name(sent) in names:
            node.replace_all_uses_with(sent.args[0])
            graph.erase_node(node)
            graph.erase_node(sent)


def inductor(
    segment: GraphSegment, attributes: torch.nn.Module, inputs: Sequence[torch.Tensor], folder: Path | None
) -> tuple[Function, bool]:
    """Return the segment compiled by Inductor, and whether it was compiled now: not if `folder` has it."""
    path = None if folder is None else folder / f"{_digest(segment, inputs)}.bin"
    if path is not None and path.exists():
        return torch._inductor.CompiledArtifact.load(path=str(path), format="binary"), False
    with torch.no_grad():
        made = torch._inductor.standalone_compile(
            fx.GraphModule(attributes, segment.graph),
            list(inputs),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": _INDUCTOR},
        )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path=str(path), format="binary")
    return made, True


def _digest(segment: GraphSegment, inputs: Sequence[torch.Tensor]) -> str:
    """Return a key of a compiled segment: its operations, its inputs, and the versions that compiled it."""
    kinds = [(tuple(x.shape), x.stride(), str(x.dtype), str(x.device)) for x in inputs]
    gpu = torch.cuda.get_device_name() if any(x.is_cuda for x in inputs) else ""
    found = f"{segment.graph} {kinds} {torch.__version__} {gpu} {torch.get_num_threads()}"
    return hashlib.sha256(found.encode()).hexdigest()
