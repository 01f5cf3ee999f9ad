"""The parts that a rank's graph is run in: split at optimizer steps and, on the CPU, where ranks compare programs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from shardtensor.spmd.comparison import SUMS
from shardtensor.spmd.markers import CHECKS, GRADIENT, STEPPED, Node, is_scaled, summed_dtype

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
_EFFECTS = {GRADIENT, STEPPED, aten.copy_.default, *CHECKS}


@attrs.frozen(eq=False)
class GraphSegment:
    """A part of the graph.

    Attributes:
        graph: from `inputs` to `outputs`.
        inputs, outputs: nodes of the whole graph.
        step: the STEPPED node behind it; None behind the last.
    """

    graph: fx.Graph
    inputs: list[Node]
    outputs: list[Node]
    step: Node | None


@attrs.frozen(eq=False)
class Segments:
    """A graph, split.

    Attributes:
        start: if ranks compare their programs, the part that computes what they send with the comparison, and the part
            that needs nothing from other ranks; else None.
        sums: all-reductions that are sent with the comparison: the operand, and the node that is the sum.
        others: the parts behind, each with the step that ends it.
    """

    start: tuple[GraphSegment, GraphSegment] | None
    sums: list[tuple[Node, Node]]
    others: list[GraphSegment]


def split(graph: fx.Graph, also: Sequence[Node] = (), group: str | None = None, overlaps: bool = True) -> Segments:
    """Split a graph behind each part that ends with an optimizer step.

    Args:
        also: nodes that are returned though nothing in the graph uses them.
        group: the name of the group whose ranks compare their programs; None if they do not.
        overlaps: whether a part runs meanwhile.
    """
    drop_unused(graph, also)
    found = [node for node in graph.nodes if group is not None and _is_sum_of_batch(node, group)][:SUMS]
    sent = {node: next(iter(node.users)) for node in found}  # a wait is the only user of a collective
    counted = _ancestors(found) - sent.keys()
    is_first = group is not None and overlaps  # no collective was passed
    number: dict[Node, int] = dict.fromkeys((*sent, *sent.values()), -1)
    steps: list[Node | None] = []
    for node in graph.nodes:
        if node in number or node.op != "call_function":
            is_first = is_first and node not in sent.values()
            continue
        is_first = is_first and node.target is not STEPPED and not _is_collective(node)
        if node in counted:
            number[node] = 0
        elif node.target is operator.getitem:
            number[node] = number[node.args[0]]
        elif is_first and node.target is not aten.copy_.default:
            number[node] = 1
        else:
            number[node] = 2 + len(steps)
            # Results are reduced at the end of the graph; they need no later parameters.
            if all(x.op == "call_function" for x in node.all_input_nodes) and not _has_effect(node):
                number[node] = max(2, max((number[x] for x in node.all_input_nodes), default=number[node]))
        if node.target is STEPPED:
            steps.append(node)
    output = next(node for node in graph.nodes if node.op == "output")
    wanted = {*output.all_input_nodes, *also, *(node.args[0] for node in sent)}
    parts: list[GraphSegment] = []
    for i, step in reversed(list(enumerate((None, None, *steps, None)))):
        wanted |= set() if step is None else set(step.all_input_nodes)
        own = [n for n in graph.nodes if number.get(n) == i and n.target is not STEPPED]
        inside = {*own, *_views(x for n in own for x in n.all_input_nodes)}
        nodes = [n for n in graph.nodes if n in inside]
        inputs = list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside))
        parts.insert(0, _segment(nodes, inputs, [n for n in own if n in wanted], step))
        wanted |= set(inputs)
    start = None if group is None else (parts[0], parts[1])
    return Segments(start, [(node.args[0], wait) for node, wait in sent.items()], parts[2:])


def drop_unused(graph: fx.Graph, kept: Sequence[Node] = ()) -> None:
    """Erase operations that nothing needs; a draw of random numbers stays, since it changes the generator."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in kept and node.op == "call_function" and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: Node) -> bool:
    """Whether an operation does more than return a result."""
    tags = getattr(node.target, "tags", ())
    return node.target in _EFFECTS or torch.Tag.nondeterministic_seeded in tags


def _is_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == c10d.name


def _views(nodes: Iterable[Node]) -> set[Node]:
    """Return those that are views, and the views that they are made from: a part makes its own."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        returns: Sequence[Any] = node.target._schema.returns if hasattr(node.target, "_schema") else ()
        if node not in found and len(returns) == 1 and returns[0].alias_info is not None and not _has_effect(node):
            found.add(node)
            left += node.all_input_nodes
    return found


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and the operations that they are computed by."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found and node.op == "call_function":
            found.add(node)
            left += node.all_input_nodes
    return found


def _is_sum_of_batch(node: Node, group: str) -> bool:
    """Whether a node adds up single numbers that the ranks of a group compute from their batches alone."""
    dtype = summed_dtype(node, group)
    return dtype is not None and not dtype.is_complex and _is_of_batch(node)


def start_early(graph: fx.Graph) -> None:
    """Start the reductions of single values where these are computed; they are waited for where they are needed.

    What is computed from the batch alone is computed and sent first.
    """
    sums = []
    for node in [node for node in graph.nodes if node.target is c10d.all_reduce.default]:
        sent = node.args[0]
        if is_scaled(sent) and len(sent.users) == 1 and sent.args[0].op == "call_function":
            sent.args[0].append(sent)
        if sent.op == "call_function":
            sent.append(node)
        sums += [node] * _is_of_batch(node)
    first = _ancestors(sums)
    behind = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node in first]:
        behind.append(node)
        behind = node


def _is_of_batch(reduction: Node) -> bool:
    """Whether a rank computes its part of a reduction from its batch alone."""
    computed = _ancestors(reduction.all_input_nodes)
    sources = {x for node in (reduction, *computed) for x in node.all_input_nodes} - computed
    return all(x.op == "get_attr" or x.meta.get("of_batch") for x in sources) and not any(
        _has_effect(node) or _is_collective(node) for node in computed
    )


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
