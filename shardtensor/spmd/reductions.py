"""What changes a value of the local graph, so that the next operation can use it: reductions, factors, broadcasts."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import inf
from typing import Any

import attrs
import torch
from torch import fx

from shardtensor.rules.batch import PARTIAL, REPLICATED, BatchMode, BatchValue
from shardtensor.spmd.sizes import BatchPart, plain

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional

Changed = tuple[fx.Node, BatchValue]


class Reductions:
    """Inserts these behind the last node of a graph, each once for a value.

    Attributes:
        described: what the graph's nodes are.
        custom: the meta data of new nodes.
        degree: of the loss whose backward runs: 1 if it is a sum over samples, and else 0.
    """

    def __init__(self, graph: fx.Graph, part: BatchPart, mode: BatchMode, group_name: str) -> None:
        self.graph, self.part, self.mode, self.group_name = graph, part, mode, group_name
        self.described: dict[fx.Node, BatchValue] = {}
        self.custom: dict[str, Any] = {}
        self.degree = 0
        self._made: dict[tuple[Any, ...], Changed] = {}
        self._factors: dict[fx.Node, tuple[fx.Node, Fraction]] = {}

    def call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """Append a call."""
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta["custom"] = self.custom
        return node

    def waited(self, target: Any, *args: Any) -> fx.Node:
        """Append a collective."""
        return self.call(c10d.wait_tensor.default, (self.call(target, args, {}),), {})

    def broadcast(self, node: fx.Node) -> fx.Node:
        """Give all ranks the value of the first."""
        return self.waited(c10d.broadcast.default, node, 0, self.group_name)

    def known(self, node: fx.Node, value: BatchValue) -> Changed:
        """Return a partial value as it is, or its sum if an operation before has needed that."""
        return self._made.get((node, "reduced"), (node, value))

    def plain(self, node: fx.Node, value: BatchValue) -> Changed:
        """Return the value with the dense numbers: of all samples, or of those that this rank has."""
        return self.reduced(node, value) if value.kind == PARTIAL else self.scaled(node, value)

    def reduced(self, node: fx.Node, value: BatchValue) -> Changed:
        """Return the sum (mean, maximum, ...) of a partial value over the ranks, replicated."""
        found = attrs.evolve(value, kind=REPLICATED, share=0, power=1.0)
        return self._once((node, "reduced"), lambda: self._all_reduced(node, value), found)

    def scaled(self, node: fx.Node, value: BatchValue) -> Changed:
        """Return a value times its factor, which then is 1."""
        if not value.share:
            return node, value
        return self._times(node, self.part.share**value.share, attrs.evolve(value, share=0))

    def split(self, node: fx.Node, value: BatchValue, share: int) -> Changed:
        """Return a replicated value as a partial one: the sum of all ranks' parts is the value."""
        found = attrs.evolve(value, kind=PARTIAL, share=share)
        return (node, found) if share == 1 else self._times(node, self.part.share ** (1 - share), found)

    def weighed(self, node: fx.Node, value: BatchValue) -> Changed:
        """Return a gradient that does not depend on the batch, so that it keeps its value if the sum is divided."""
        found = attrs.evolve(value, of_batch=True)
        return self._times(node, Fraction(self.part.ranks), found) if self.degree else (node, found)

    def _times(self, node: fx.Node, factor: Fraction, found: BatchValue) -> Changed:
        source, before = self._factors.get(node, (node, Fraction(1)))
        total = before * factor  # one multiplication for both
        if total == 1 and self.part.is_even:  # if not, another rank multiplies: all insert the same nodes
            return source, found
        made, _ = self._once(
            (source, "times", total), lambda: self.call(aten.mul.Tensor, (source, plain(total)), {}), found
        )
        self._factors[made] = source, total
        return made, found

    def _once(self, key: tuple[Any, ...], make: Callable[[], fx.Node], found: BatchValue) -> Changed:
        if key not in self._made:
            self._made[key] = make(), found
            self.described[self._made[key][0]] = found
        return self._made[key]

    def _all_reduced(self, node: fx.Node, value: BatchValue) -> fx.Node:
        power = value.power
        if abs(power) == inf:
            return self._extreme(node, "max" if power > 0 else "min")
        if power != 1:
            sent = self.call(aten.pow.Tensor_Scalar, (node, power), {})
            made = self.waited(c10d.all_reduce.default, sent, "sum", self.group_name)
            return self.call(aten.pow.Tensor_Scalar, (made, 1 / power), {})
        sent, _ = self.scaled(node, value)
        return self.waited(c10d.all_reduce.default, sent, "sum", self.group_name)

    def _extreme(self, node: fx.Node, op: str) -> fx.Node:
        return self.waited(c10d.all_reduce.default, node, op, self.group_name)
