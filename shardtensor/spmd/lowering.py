"""From the local graph to functions: one before each optimizer step, run as they are or compiled by Inductor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtensor.comm.group import Group
from shardtensor.spmd.markers import CHECKS, GRADIENT, STEPPED, Node

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
Function = Callable[..., Sequence[torch.Tensor]]
_INDUCTOR = {
    "fallback_random": True,  # the random numbers of eager steps
    "reorder_for_locality": False,  # it would start collectives just before the wait for them
}
_EFFECTS = {GRADIENT, STEPPED, aten.copy_.default, *CHECKS}


@attrs.frozen(eq=False)
class GraphSegment:
    """A part of the graph, between optimizer steps.

    Attributes:
        graph: from `inputs` to `outputs`.
        inputs, outputs: nodes of the whole graph.
        step: the STEPPED node behind it; None behind the last.
    """

    graph: fx.Graph
    inputs: list[Node]
    outputs: list[Node]
    step: Node | None


def split_at_steps(graph: fx.Graph, also: Sequence[Node] = ()) -> list[GraphSegment]:
    """Split a graph behind each part that ends with an optimizer step.

    Args:
        also: nodes that are returned though nothing in the graph uses them.
    """
    drop_unused(graph, also)
    _start_early(graph)
    number: dict[Node, int] = {}
    steps: list[Node | None] = []
    for node in graph.nodes:
        number[node] = len(steps)
        if node.target is STEPPED:
            steps.append(node)
        elif all(x.op == "call_function" for x in node.all_input_nodes) and not _has_effect(node):
            # Results are reduced at the end of the graph; they need no later parameters.
            number[node] = max((number[x] for x in node.all_input_nodes), default=number[node])
    steps.append(None)
    output = next(node for node in graph.nodes if node.op == "output")
    needed = {*output.all_input_nodes, *also}
    found = []
    for i, step in enumerate(steps):
        nodes = [n for n in graph.nodes if number[n] == i and n.op == "call_function" and n.target is not STEPPED]
        inside = set(nodes)
        inputs = list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside))
        outputs = [n for n in nodes if n in needed or any(u not in inside and u.op != "output" for u in n.users)]
        found.append(_segment(nodes, inputs, outputs, step))
    return found


def drop_unused(graph: fx.Graph, kept: Sequence[Node] = ()) -> None:
    """Erase operations that nothing needs; a draw of random numbers stays, since it changes the generator."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in kept and node.op == "call_function" and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: Node) -> bool:
    """Whether an operation does more than return a result."""
    tags = getattr(node.target, "tags", ())
    return node.target in _EFFECTS or torch.Tag.nondeterministic_seeded in tags


def _start_early(graph: fx.Graph) -> None:
    """Start the reductions of single values where these are computed; they are waited for where they are needed."""
    for node in list(graph.nodes):
        if node.target is c10d.all_reduce.default and not node.meta.get("owned"):
            sent = node.args[0]
            is_scaled = sent.target is aten.mul.Tensor and not isinstance(sent.args[1], fx.Node)
            if is_scaled and len(sent.users) == 1 and sent.args[0].op == "call_function":
                sent.args[0].append(sent)
            if sent.op == "call_function":
                sent.append(node)


def _segment(nodes: list[Node], inputs: list[Node], outputs: list[Node], step: Node | None) -> GraphSegment:
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    kept = []
    for node in inputs:
        if node.op == "get_attr":
            new[node] = graph.get_attr(str(node.target))
            continue
        kept.append(node)
        new[node] = graph.placeholder(node.name)
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output([new[node] for node in outputs])
    return GraphSegment(graph, kept, outputs, step)


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
