"""Single operations of a train step on one rank: what they return, with arguments of this rank's part of the batch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx

from shardtensor.errors import RuleError
from shardtensor.rules.batch import (
    REPLICATED,
    SHARDED,
    BatchMode,
    BatchValue,
    Operand,
    OperandFirst,
    ReduceFirst,
    Refused,
    ResultShape,
    ScaleFirst,
    SplitFirst,
)
from shardtensor.rules.batch_infer import infer
from shardtensor.rules.batch_kernels import DRAWS
from shardtensor.spmd.decompositions import decomposition, traced
from shardtensor.spmd.local_arguments import clamped, given_arguments, local_number, local_power
from shardtensor.spmd.reductions import Reductions
from shardtensor.spmd.sizes import BatchPart, batch_dims, paired

aten: Any = torch.ops.aten
_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
_INDEXING = {"index", "_unsafe_index", "index_put", "_unsafe_index_put"}


class Operations:
    """Appends operations to the graph of a rank.

    Attributes:
        graph: of this rank.
        new: the trace's nodes -> this graph's; a tuple for several results that are no list in the graph.
        values: the trace's nodes -> what they are; lists for several results.
        twin: the trace's nodes -> those of the trace of twice as many samples.
        stepped: optimizer steps -> the parameters that they change.
    """

    def __init__(self, part: BatchPart, mode: BatchMode, group_name: str) -> None:
        self.part, self.mode, self.group_name = part, mode, group_name
        self.graph = fx.Graph()
        self.reductions = Reductions(self.graph, part, mode, group_name)
        self.new: dict[Any, Any] = {}
        self.values: dict[Any, Any] = {}
        self.twin: dict[fx.Node, fx.Node] = {}
        self.stepped: dict[Any, list[Any]] = {}

    def item(self, a: fx.Node) -> None:
        source: Any
        i: Any
        source, i = a.args
        if a.target is not operator.getitem:
            raise Refused(f"there is no rule for `{getattr(a.target, '__name__', a.target)}`")
        if source in self.stepped:  # the optimizer writes to the parameter itself
            self.keep(a, self.stepped[source][i], BatchValue())
        elif isinstance(self.new[source], tuple):
            self.new[a], self.values[a] = self.new[source][i], self.values[source][i]
        else:
            self.keep(a, self.call(a.target, (self.new[source], i), {}), self.values[source][i])

    def keep(self, a: fx.Node, node: Any, value: Any) -> None:
        self.new[a], self.values[a] = node, value
        if isinstance(value, BatchValue):
            self.reductions.described[node] = value
            node.meta.setdefault("number", _dtype_of_number(a.meta.get("val")))

    def call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        return self.reductions.call(target, args, kwargs)

    # -- operations ---------------------------------------------------------------------------------------------------

    def operation(self, a: fx.Node, b: fx.Node) -> None:
        try:
            self.by_rule(a, b)
        except Refused as refused:
            function = decomposition(a.target)
            if function is None or not a.all_input_nodes:
                raise
            try:  # what has no rule, or mixes samples, may consist of operations that do not
                self._by_smaller(a, b, function)
            except (Refused, RuleError):
                raise refused from None

    def _by_smaller(self, a: fx.Node, b: fx.Node, function: Any) -> None:
        (whole, inputs), (doubled, _) = traced(function, a), traced(function, b)
        own = iter(inputs)
        for x, y in paired(whole, doubled):
            self.twin[x] = y
            x.meta["custom"] = a.meta.get("custom") or {}
            if x.op == "placeholder":
                source = next(own)
                self.new[x], self.values[x] = self.new[source], self.values[source]
            elif x.target is operator.getitem:
                self.item(x)
            elif x.op != "output":
                self.operation(x, y)
            else:
                made: Any = x.args[0]
                if isinstance(made, list | tuple):
                    self.new[a] = tuple(self.new.get(z) for z in made)
                    self.values[a] = [self.values.get(z, BatchValue()) for z in made]
                else:
                    self.new[a], self.values[a] = self.new[made], self.values[made]

    def by_rule(self, a: fx.Node, b: fx.Node) -> None:
        target: Any = a.target
        if not hasattr(target, "_schema"):
            raise Refused(f"there is no rule for `{target}`")
        name = target._schema.name.partition("::")[2]
        given, other = given_arguments(a), given_arguments(b)
        if name in ("slice", "slice_backward"):
            given, other = clamped(given), clamped(other)
        places = _places(name, given)
        nodes = [None if place is None else _at(given, place) for place in places]
        found, changed = self._infer(name, a, nodes, {k: v for k, v in given.items() if not _has_nodes(v)})
        local = self._local(a, given, other, dict(zip(places, changed, strict=True)))
        if name == "slice":
            local["start"], local["end"] = self._ends(a, given, other)
        if name in _INDEXING:
            self._own_numbers(local, given, nodes)
        if name == "arange" and found[0].kind == SHARDED:
            node = self._arange(a, given)
        elif target in _SQUEEZES:  # a rank may have one sample
            shape = a.args[0].meta["val"].shape  # type: ignore[union-attr]
            named = range(len(shape)) if target is aten.squeeze.default else given["dim"]
            dims = [d for d in ([named] if isinstance(named, int) else named) if shape[d] == 1]
            node = self.call(aten.squeeze.dims, (local["self"], dims), {})
        else:
            passed = [x.name for x in target._schema.arguments]
            args = [local[key] for key in passed[: len(a.args)]]
            kwargs = {key: local[key] for key in a.kwargs}
            if name == "slice" and len(a.args) > 2:
                args[2:4] = [local["start"], local["end"]][: len(args) - 2]
            node = self.call(target, args, kwargs)
            power = local_power(a, "other", given.get("other"), other.get("other"))
            sign = 1 if name == "div" else -1
            found = [_grown(value, sign * power) for value in found]
        if name in DRAWS | {"native_dropout"} and found[0].kind == REPLICATED:  # equal on all ranks
            if is_list(a):
                items = [self.call(operator.getitem, (node, i), {}) for i in range(len(found))]
                self.new[a] = tuple(self.reductions.broadcast(x) for x in items)
                self.values[a] = found
                return
            node = self.reductions.broadcast(node)
        self.keep(a, node, found if is_list(a) else found[0])

    def _infer(
        self,
        name: str,
        a: fx.Node,
        nodes: Sequence[fx.Node | None],
        options: dict[str, Any],
        is_pointwise: bool | None = None,
    ) -> tuple[list[BatchValue], list[fx.Node | None]]:
        """Return what the results are, and the operands, changed as the operation needs them."""
        target: Any = a.target
        if is_pointwise is None:
            is_pointwise = torch.Tag.pointwise in target.tags
        changed = [None if x is None else self.reductions.known(self.new[x], self.values[x]) for x in nodes]
        while True:
            operands = [
                None if x is None or y is None else Operand(y[1], tuple(x.meta["val"].shape))
                for x, y in zip(nodes, changed, strict=True)
            ]
            try:
                found = infer(name, operands, options, self.results(a), self.mode, is_pointwise=is_pointwise)
                return found, [None if x is None else x[0] for x in changed]
            except OperandFirst as needed:
                node, value = changed[needed.operand]  # type: ignore[misc]
                if isinstance(needed, ReduceFirst):
                    changed[needed.operand] = self.reductions.reduced(node, value)
                    changed = [None if y is None else self.reductions.known(*y) for y in changed]
                elif isinstance(needed, ScaleFirst):
                    changed[needed.operand] = self.reductions.scaled(node, value)
                elif isinstance(needed, SplitFirst):
                    changed[needed.operand] = self.reductions.split(node, value, needed.share)
                else:
                    changed[needed.operand] = self.reductions.weighed(node, value)

    def results(self, a: fx.Node) -> list[ResultShape]:
        whole, doubled = a.meta["val"], self.twin[a].meta["val"]
        pairs = zip(whole, doubled, strict=True) if is_list(a) else [(whole, doubled)]
        return [
            ResultShape(tuple(x.shape), batch_dims(x, y), x.is_floating_point() or x.is_complex())
            if isinstance(x, torch.Tensor)
            else ResultShape(())
            for x, y in pairs
        ]

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _local(
        self, a: fx.Node, given: dict[str, Any], other: dict[str, Any], changed: dict[Any, Any]
    ) -> dict[str, Any]:
        """Return the arguments for this rank."""
        found = {}
        for key, value in given.items():
            if isinstance(value, fx.Node):
                found[key] = changed[key, None]
            elif _has_nodes(value):
                found[key] = [changed[key, i] if isinstance(x, fx.Node) else x for i, x in enumerate(value)]
            elif a.target is not aten.slice.Tensor or key not in ("start", "end"):
                found[key] = local_number(a, key, value, other[key], self.part)
        return found

    def _ends(self, a: fx.Node, given: dict[str, Any], other: dict[str, Any]) -> list[Any]:
        """Return the ends of a slice: of this rank's blocks of samples, or of a dim that is equal on all ranks."""
        value = self.values[given["self"]]
        ends = [(given[key], other[key]) for key in ("start", "end")]
        if value.kind != SHARDED or value.dim != given["dim"] % len(given["self"].meta["val"].shape):
            return [x for x, _ in ends]
        return [self.part.size(x, y) for x, y in ends]

    def _arange(self, a: fx.Node, given: dict[str, Any]) -> fx.Node:
        start, step = given.get("start", 0), given.get("step", 1)
        whole, doubled = a.meta["val"], self.twin[a].meta["val"]
        count = self.part.size(len(whole), len(doubled))
        if count is None:
            raise Refused("it counts neither the samples nor the same for each")
        begin = start + self.part.start * len(whole) // self.part.total * step
        end = begin + (count - (0 if isinstance(step, int) else 0.5)) * step  # without a number more by rounding
        return self.call(aten.arange.start_step, (begin, end, step), dict(a.kwargs))

    def _own_numbers(self, local: dict[str, Any], given: dict[str, Any], nodes: Sequence[fx.Node | None]) -> None:
        """Let this rank look up its samples by their place in its part."""
        value, x = self.values[nodes[0]], nodes[0]
        if x is None or value.kind != SHARDED or value.dim >= len(given["indices"]):
            return
        places = list(local["indices"])
        own = given["indices"][value.dim]
        if own is not None:  # 0, 1, 2, ..., as the rules have checked
            first = self.part.start * max(own.meta["val"].shape) // self.part.total
            places[value.dim] = self.call(aten.sub.Tensor, (places[value.dim], first), {})
        local["indices"] = places


def _grown(value: BatchValue, power: int) -> BatchValue:
    """A value divided by `power` times the number of samples: each rank divides by its own number."""
    degree = None if value.degree is None else value.degree - power
    return attrs.evolve(value, share=value.share + power, degree=degree) if power else value


def _dtype_of_number(x: Any) -> torch.dtype | None:
    return x.dtype if isinstance(x, torch.Tensor) and not x.dim() else None


def is_list(a: fx.Node) -> bool:
    return isinstance(a.meta.get("val"), list | tuple)


def _has_nodes(value: Any) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, list | tuple) and any(map(_has_nodes, value)))


def _places(name: str, given: dict[str, Any]) -> list[Any]:
    """Return the places of the operands, argument and number in a list; for indices, with None where a dim is kept."""
    found: list[Any] = []
    for key, value in given.items():
        if isinstance(value, fx.Node):
            found.append((key, None))
        elif isinstance(value, list | tuple):
            keeps = key == "indices" and name in _INDEXING
            found += [
                (key, i) if isinstance(x, fx.Node) else None
                for i, x in enumerate(value)
                if keeps or isinstance(x, fx.Node)
            ]
    return found


def _at(given: dict[str, Any], place: tuple[str, Any]) -> fx.Node:
    key, i = place
    found: fx.Node = given[key] if i is None else given[key][i]
    return found
