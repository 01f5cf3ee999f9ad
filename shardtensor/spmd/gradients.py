"""Passes over the local graph: the reductions of gradients, in the buckets and units of the eager library."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any

import attrs
import torch
from torch import fx

from shardtensor.rules.batch import PARTIAL, BatchMode, BatchValue
from shardtensor.spmd.markers import GRADIENT, Node, summed_dtype
from shardtensor.spmd.sizes import BatchPart

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional


@attrs.frozen(eq=False)
class GradientBucketPlan:
    """Gradients that are all-reduced together.

    Attributes:
        params: their numbers, in the order in which they are packed.
        sizes: their numbers of elements; zeros are sent for those without a gradient.
        flags: elements of the eager bucket behind the gradients, so that sums are made in the same order.
    """

    params: tuple[int, ...]
    sizes: tuple[int, ...]
    flags: int


def all_reduce_gradients(
    graph: fx.Graph, buckets: Sequence[GradientBucketPlan], part: BatchPart, mode: BatchMode, group: str, has_avg: bool
) -> None:
    """Replace gradients by their averages (or sums) over the ranks.

    A bucket is sent as soon as backward has computed its last gradient, and waited for where the gradients are used.
    Sums that are only returned, such as a loss, are sent in the place of its flags.
    """
    for markers in rounds(graph):
        by_number = {marker.args[1]: marker for marker in markers}
        place = position(graph)
        for bucket in buckets:
            found: list[Any] = [by_number[number] for number in bucket.params if number in by_number]
            if not found:
                continue
            factors = [gradient_factor(marker.meta["grad"], part, mode) for marker in found]
            averages = are_averaged([marker.meta["grad"] for marker in found], part, mode)
            last = max((marker.args[0] for marker in found), key=place.__getitem__)
            made = Inserter(graph, last)
            left = iter(factors)
            val = found[0].meta["val"]
            kind = {"dtype": val.dtype, "device": val.device}
            # Halves and quarters are exact, so they may be taken before the sum, where it costs nothing.
            divides_first = not has_avg and part.ranks & (part.ranks - 1) == 0 and val.dtype != torch.float16
            flat = []
            for number, size in zip(bucket.params, bucket.sizes, strict=True):
                if number not in by_number:
                    flat.append(made.call(aten.zeros.default, [size], **kind))
                    continue
                grad, factor = made.call(aten.reshape.default, by_number[number].args[0], [-1]), next(left)
                if averages:
                    factor = Fraction(1, part.ranks) if divides_first else Fraction(1)
                flat.append(grad if factor == 1 else made.call(aten.mul.Tensor, grad, float(factor)))
            returned = [] if has_avg else _only_returned(graph, place, last, val.dtype, group)[: bucket.flags]
            flat += [made.call(aten.reshape.default, node.args[0], [1]) for node in returned]
            if bucket.flags > len(returned):
                flat.append(made.call(aten.ones.default, [bucket.flags - len(returned)], **kind))
            packed = made.call(aten.cat.default, flat)
            op = "avg" if averages and has_avg else "sum"
            sent = made.call(c10d.all_reduce.default, packed, op, group)
            sent.meta["owned"] = True
            first_user = min(found, key=place.__getitem__)
            late = Inserter(graph, first_user.prev)
            summed = late.call(c10d.wait_tensor.default, sent)
            for i, node in enumerate(returned, -bucket.flags):
                wait = next(iter(node.users))
                wait.replace_all_uses_with(late.call(aten.select.int, summed, 0, i))
                graph.erase_node(wait)
                graph.erase_node(node)
            if averages and not has_avg and not divides_first:
                summed = late.call(aten.div.Tensor, summed, part.ranks)
            sizes = [*bucket.sizes, *([bucket.flags] if bucket.flags else [])]
            parts = late.call(aten.split_with_sizes.default, summed, sizes)
            for i, number in enumerate(bucket.params):
                if number in by_number:
                    one = late.getitem(parts, i)
                    shape = list(by_number[number].meta["val"].shape)
                    by_number[number].replace_all_uses_with(late.call(aten.view.default, one, shape))
        marker: Any
        for marker in markers:
            if marker.users:  # no other rank has this gradient: a world of one
                marker.replace_all_uses_with(marker.args[0])
            graph.erase_node(marker)


def _only_returned(
    graph: fx.Graph, place: Mapping[Node, int], last: Node, dtype: torch.dtype, group: str
) -> list[Node]:
    """Return the sums of single numbers that nothing but the step's results uses, and that are computed by then."""
    return [
        node
        for node in graph.nodes
        if summed_dtype(node, group) == dtype
        and place[node.args[0]] <= place[last]
        and all(user.op == "output" for wait in node.users for user in wait.users)
    ]


def gradient_factor(value: BatchValue, part: BatchPart, mode: BatchMode) -> Any:
    """Return what this rank's gradient is multiplied with before the sum over ranks."""
    factor = part.share**value.share
    if mode.averages and value.degree:  # of a loss that is a sum over samples
        factor = factor / part.ranks**value.degree
    return factor if value.kind == PARTIAL else factor / part.ranks


def are_averaged(values: Sequence[BatchValue], part: BatchPart, mode: BatchMode) -> bool:
    """Return whether the reduced gradients are the averages of the ranks' ones: the same on all ranks."""
    is_equal = part.is_even or not any(value.share for value in values)  # of a rank's own share no other rank knows
    return is_equal and all(gradient_factor(value, part, mode) * part.ranks == 1 for value in values)


def rounds(graph: fx.Graph) -> list[list[Node]]:
    """Return the gradients of each backward."""
    found = []
    for is_gradient, nodes in groupby(list(graph.nodes), lambda node: node.target is GRADIENT):
        if is_gradient:
            found.append(list(nodes))
    return found


def position(graph: fx.Graph) -> dict[Node, int]:
    """Return the place of each node."""
    return {node: i for i, node in enumerate(graph.nodes)}


class Inserter:
    """Inserts nodes one after the other, behind a node."""

    def __init__(self, graph: fx.Graph, behind: Node, custom: dict[str, Any] | None = None) -> None:
        self.graph, self.behind = graph, behind
        self.custom = custom or behind.meta.get("custom") or {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call."""
        with self.graph.inserting_after(self.behind):
            self.behind = self.graph.call_function(target, args, kwargs)
        self.behind.meta["custom"] = self.custom
        return self.behind

    def getitem(self, node: Node, i: int) -> Node:
        """Insert an access to one of several results."""
        return self.call(operator.getitem, node, i)
