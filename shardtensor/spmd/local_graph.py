"""The graph that one rank runs: the traced step, with this rank's sizes and a reduction wherever a value needs one.

It goes through the nodes in order and asks `shardtensor.rules.batch_infer` what each value is. A partial value is
reduced before the first operation that is not linear in it; a gradient is reduced where its backward ends.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import Any

import attrs
import torch
from torch import fx

from shardtensor.errors import RuleError
from shardtensor.rules.batch import (
    FLAT,
    PARTIAL,
    REPLICATED,
    SHARDED,
    BatchMode,
    BatchValue,
    Operand,
    OperandFirst,
    ReduceFirst,
    Refused,
    Result,
    ScaleFirst,
    SplitFirst,
    by,
)
from shardtensor.rules.batch_infer import infer
from shardtensor.rules.batch_kernels import DRAWS
from shardtensor.spmd.decompositions import decomposition, traced
from shardtensor.spmd.local_arguments import clamped, given_arguments, local_number, local_power
from shardtensor.spmd.markers import GRADIENT, STEPPED, Node
from shardtensor.spmd.reductions import Reductions
from shardtensor.spmd.sizes import Part, batch_dims, mapped, paired, where
from shardtensor.spmd.tracing import Trace

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
_CHECKS = {aten._assert_async.msg, aten._assert_async.default}
_LABEL_BACKWARDS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
_LABEL_LOSSES = _LABEL_BACKWARDS | {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
_INDEXING = {"index", "_unsafe_index", "index_put", "_unsafe_index_put"}


@attrs.define(eq=False)
class LocalGraph:
    """What a rank runs.

    Attributes:
        graph: inputs as the trace's; GRADIENT nodes stand where gradients are to be reduced, STEPPED ones where
            optimizers step.
        values: what each node is, for `explain`.
    """

    graph: fx.Graph
    values: dict[Node, BatchValue]


def localize(
    whole: Trace,
    doubled: Trace,
    part: Part,
    mode: BatchMode,
    group_name: str,
    inputs: Sequence[BatchValue],
    sharded: Set[int] = frozenset(),
) -> LocalGraph:
    """Return the graph of this rank.

    Args:
        whole, doubled: the traces of the whole batch, and of twice as many samples.
        inputs: what the inputs are.
        sharded: numbers of the parameters whose gradients are reduce-scattered: each rank has flat shards of them.

    Raises:
        RuleError: an operation does not keep its meaning on a part of the batch.
    """
    builder = _Builder(part, mode, group_name, list(inputs), sharded, (whole.graph, doubled.graph))
    for a, b in paired(whole.graph.graph, doubled.graph.graph):
        try:
            builder.add(a, b)
        except Refused as refused:
            raise _refusal(a, str(refused), builder) from None
    return LocalGraph(builder.graph, builder.reductions.described)


class _Builder:
    def __init__(
        self,
        part: Part,
        mode: BatchMode,
        group_name: str,
        inputs: list[BatchValue],
        sharded: Set[int],
        attributes: tuple[torch.nn.Module, torch.nn.Module],
    ) -> None:
        self.part, self.mode, self.group_name, self.inputs = part, mode, group_name, inputs
        self.sharded, self.attributes = sharded, attributes
        self.graph = fx.Graph()
        self.reductions = Reductions(self.graph, part, mode, group_name)
        self.new: dict[Node, Any] = {}
        self.values: dict[Node, Any] = {}  # of the trace's nodes; lists for several results
        self.twin: dict[Node, Node] = {}
        self.numbers: dict[Node, int] = {}  # of inputs
        self.stepped: dict[Node, list[Any]] = {}
        self.counts: dict[Node, Node] = {}  # of labels that are not ignored, for losses
        self.was_backward = self.starts_backward = self.accumulates = False
        self.losses: list[int | None] = []  # the degrees of those of the backward that begins

    # -- nodes --------------------------------------------------------------------------------------------------------

    def add(self, a: Node, b: Node) -> None:
        """Add what a node of the trace is on this rank; `b` is its twin in the trace of twice as many samples."""
        self.twin[a] = b
        self.reductions.custom = a.meta.get("custom") or {}
        if a.op == "placeholder":
            value = self.inputs.pop(0)
            self.numbers[a] = len(self.numbers)
            self._keep(a, self.graph.placeholder(a.name), attrs.evolve(value, of_batch=value.kind == SHARDED))
        elif a.op == "get_attr":
            self._constant(a, b)
        elif a.op == "output":
            self.graph.output([self._result(x) for x in a.args[0]])
        else:
            self._call_function(a, b)

    def _call_function(self, a: Node, b: Node) -> None:
        target: Any = a.target
        is_seed = self._finds_loss(a)
        if target.__module__ == "_operator":
            self._item(a)
        elif target is GRADIENT:
            self._gradient(a)
        elif target is STEPPED:
            self._stepped(a)
        elif target is aten.copy_.default:
            self._write(a)
        elif target in (aten.detach.default, aten.alias.default):  # nothing in the graph needs a gradient
            self.new[a], self.values[a] = self.new[a.args[0]], self.values[a.args[0]]
        elif target in _CHECKS:  # each rank checks its part
            self._call(target, (self.new[a.args[0]], *a.args[1:]), {})
        elif "profiler" in str(target):
            return
        elif target in _LABEL_LOSSES and self._is_mean_of_labels(a):
            self._mean_of_labels(a, b)
        elif str(target).startswith("aten._foreach_"):
            self._foreach(a, b)
        else:
            self._operation(a, b)
        if is_seed:
            self.values[a] = attrs.evolve(self.values[a], is_gradient=True)

    def _constant(self, a: Node, b: Node) -> None:
        """A tensor made from numbers: the one of the whole batch, unless it has an element for each sample."""
        x, y = (operator.attrgetter(str(n.target))(m) for n, m in zip((a, b), self.attributes, strict=True))
        if x.shape != y.shape:
            raise Refused(f"a tensor of {by(tuple(x.shape))} numbers is made from the batch size")
        a.meta.setdefault("val", x)
        b.meta.setdefault("val", y)
        self._keep(a, self.graph.get_attr(str(a.target)), BatchValue())

    def _item(self, a: Node) -> None:
        source, i = a.args
        if a.target is not operator.getitem:
            raise Refused(f"there is no rule for `{getattr(a.target, '__name__', a.target)}`")
        if source in self.stepped:  # the optimizer writes to the parameter itself
            self._keep(a, self.stepped[source][i], BatchValue())
        elif isinstance(self.new[source], tuple):
            self.new[a], self.values[a] = self.new[source][i], self.values[source][i]
        else:
            self._keep(a, self._call(a.target, (self.new[source], i), {}), self.values[source][i])

    def _keep(self, a: Node, node: Any, value: Any) -> None:
        self.new[a], self.values[a] = node, value
        if isinstance(value, BatchValue):
            self.reductions.described[node] = value

    def _call(self, target: Any, args: Any, kwargs: Any) -> Node:
        return self.reductions.call(target, args, kwargs)

    # -- operations ---------------------------------------------------------------------------------------------------

    def _operation(self, a: Node, b: Node) -> None:
        try:
            self._by_rule(a, b)
        except Refused as refused:
            function = decomposition(a.target)
            if function is None or not a.all_input_nodes:
                raise
            try:  # what has no rule, or mixes samples, may consist of operations that do not
                self._by_smaller(a, b, function)
            except (Refused, RuleError):
                raise refused from None

    def _by_smaller(self, a: Node, b: Node, function: Any) -> None:
        (whole, inputs), (doubled, _) = traced(function, a), traced(function, b)
        own = iter(inputs)
        for x, y in paired(whole, doubled):
            self.twin[x] = y
            x.meta["custom"] = a.meta.get("custom") or {}
            if x.op == "placeholder":
                source = next(own)
                self.new[x], self.values[x] = self.new[source], self.values[source]
            elif x.op != "output":
                self._operation(x, y) if x.target is not operator.getitem else self._item(x)
            elif isinstance(x.args[0], list | tuple):
                self.new[a] = tuple(self.new.get(z) for z in x.args[0])
                self.values[a] = [self.values.get(z, BatchValue()) for z in x.args[0]]
            else:
                self.new[a], self.values[a] = self.new[x.args[0]], self.values[x.args[0]]

    def _by_rule(self, a: Node, b: Node) -> None:
        target: Any = a.target
        if not hasattr(target, "_schema"):
            raise Refused(f"there is no rule for `{target}`")
        name = target._schema.name.partition("::")[2]
        given, other = given_arguments(a), given_arguments(b)
        if name in ("slice", "slice_backward"):
            sizes = [
                n.args[1][g["dim"]] if name == "slice_backward" else g["self"].meta["val"].shape[g["dim"]]
                for n, g in ((a, given), (b, other))
            ]
            given, other = clamped(a, given, sizes[0]), clamped(b, other, sizes[1])
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
            shape = a.args[0].meta["val"].shape
            named = range(len(shape)) if target is aten.squeeze.default else given["dim"]
            dims = [d for d in ([named] if isinstance(named, int) else named) if shape[d] == 1]
            node = self._call(aten.squeeze.dims, (local["self"], dims), {})
        else:
            passed = [x.name for x in target._schema.arguments]
            args = [local[key] for key in passed[: len(a.args)]]
            kwargs = {key: local[key] for key in a.kwargs}
            if name == "slice" and len(a.args) > 2:
                args[2:4] = [local["start"], local["end"]][: len(args) - 2]
            node = self._call(target, args, kwargs)
            power = local_power(a, "other", given.get("other"), other.get("other"))
            sign = 1 if name == "div" else -1
            found = [_grown(value, sign * power) for value in found]
        if name in DRAWS | {"native_dropout"} and found[0].kind == REPLICATED:  # equal on all ranks
            if _is_list(a):
                items = [self._call(operator.getitem, (node, i), {}) for i in range(len(found))]
                self.new[a] = tuple(self.reductions.broadcast(x) for x in items)
                self.values[a] = found
                return
            node = self.reductions.broadcast(node)
        self._keep(a, node, found if _is_list(a) else found[0])

    def _infer(
        self,
        name: str,
        a: Node,
        nodes: Sequence[Node | None],
        options: dict[str, Any],
        is_pointwise: bool | None = None,
    ) -> tuple[list[BatchValue], list[Node | None]]:
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
                found = infer(name, operands, options, self._results(a), self.mode, is_pointwise=is_pointwise)
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

    def _results(self, a: Node) -> list[Result]:
        whole, doubled = a.meta["val"], self.twin[a].meta["val"]
        pairs = zip(whole, doubled, strict=True) if _is_list(a) else [(whole, doubled)]
        return [
            Result(tuple(x.shape), batch_dims(x, y), x.is_floating_point() or x.is_complex())
            if isinstance(x, torch.Tensor)
            else Result(())
            for x, y in pairs
        ]

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _local(self, a: Node, given: dict[str, Any], other: dict[str, Any], changed: dict[Any, Any]) -> dict[str, Any]:
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

    def _ends(self, a: Node, given: dict[str, Any], other: dict[str, Any]) -> list[Any]:
        """Return the ends of a slice: of this rank's blocks of samples, or of a dim that is equal on all ranks."""
        value = self.values[given["self"]]
        ends = [(given[key], other[key]) for key in ("start", "end")]
        if value.kind != SHARDED or value.dim != given["dim"] % len(given["self"].meta["val"].shape):
            return [x for x, _ in ends]
        return [self.part.size(x, y) for x, y in ends]

    def _arange(self, a: Node, given: dict[str, Any]) -> Node:
        start, step = given.get("start", 0), given.get("step", 1)
        whole, doubled = a.meta["val"], self.twin[a].meta["val"]
        count = self.part.size(len(whole), len(doubled))
        if count is None:
            raise Refused("it counts neither the samples nor the same for each")
        begin = start + self.part.start * len(whole) // self.part.total * step
        end = begin + (count - (0 if isinstance(step, int) else 0.5)) * step  # without a number more by rounding
        return self._call(aten.arange.start_step, (begin, end, step), dict(a.kwargs))

    def _own_numbers(self, local: dict[str, Any], given: dict[str, Any], nodes: Sequence[Node | None]) -> None:
        """Let this rank look up its samples by their place in its part."""
        value, x = self.values[nodes[0]], nodes[0]
        if x is None or value.kind != SHARDED or value.dim >= len(given["indices"]):
            return
        places = list(local["indices"])
        own = given["indices"][value.dim]
        if own is not None:  # 0, 1, 2, ..., as the rules have checked
            first = self.part.start * max(own.meta["val"].shape) // self.part.total
            places[value.dim] = self._call(aten.sub.Tensor, (places[value.dim], first), {})
        local["indices"] = places

    # -- losses that divide by the number of labels that count --------------------------------------------------------

    def _is_mean_of_labels(self, a: Node) -> bool:
        is_mean = a.args[4 if a.target in _LABEL_BACKWARDS else 3] == 1
        return is_mean and any(getattr(self.values[x], "kind", "") == SHARDED for x in a.all_input_nodes)

    def _mean_of_labels(self, a: Node, b: Node) -> None:
        """Cross entropy divides by the labels that are not ignored: by this rank's share of those of all ranks."""
        if a.target in _LABEL_BACKWARDS:
            total: Any = a.args[6]
            self.new[total], self.values[total] = self.counts[total.args[0]], BatchValue()
            self._by_rule(a, b)
            return
        x, labels, weight, _, ignored = a.args
        assert isinstance(x, fx.Node) and isinstance(labels, fx.Node)
        is_sharded = [self.values[n].kind == SHARDED and self.values[n].dim == 0 for n in (x, labels)]
        if not all(is_sharded) or self.values[x].outer != self.values[labels].outer:
            raise Refused("its operands have the samples in different dims")
        own, value = self.reductions.scaled(self.new[x], self.values[x])
        args = (own, self.new[labels], self.new[weight] if isinstance(weight, fx.Node) else None, 2, ignored)
        summed = self._call(a.target, args, {})
        first, count = (self._call(operator.getitem, (summed, i), {}) for i in range(2))
        total = self.reductions.waited(c10d.all_reduce.default, count, "sum", self.group_name)
        is_even = self.part.is_even
        scale = (aten.div.Tensor, self.part.ranks) if is_even else (aten.mul.Tensor, float(self.part.share))
        count = self.counts[a] = self._call(scale[0], (total, scale[1]), {})
        loss = self._call(aten.div.Tensor, (first, count), {})
        self.new[a] = (loss, count)
        self.values[a] = [BatchValue(PARTIAL, share=1, of_batch=True, is_gradient=value.is_gradient), BatchValue()]
        self.reductions.described[loss] = self.values[a][0]

    # -- gradients, steps, results ------------------------------------------------------------------------------------

    def _finds_loss(self, a: Node) -> bool:
        """Where a backward begins, determine whether its loss is a sum over samples. Return whether the node is the
        gradient of the loss by itself."""
        is_backward = bool((a.meta.get("custom") or {}).get("backward"))
        if is_backward and not self.was_backward:
            self.starts_backward, self.losses = True, []
        self.was_backward = is_backward
        if not self.starts_backward or a.op != "call_function":
            return False
        if a.target is aten.ones_like.default and not _is_backward(a.args[0]):
            self.losses.append(self.values[a.args[0]].degree)
            return True
        self.starts_backward = False
        degrees = {0 if degree is None or degree != 1 else 1 for degree in self.losses}
        if self.mode.averages and (len(degrees) != 1 or None in self.losses):
            raise Refused(
                "gradients of a loss that is a sum over samples are averaged over ranks, those of a mean are not, and "
                "it cannot be determined which this loss is"
            )
        degree = degrees.pop() if degrees else 0
        if self.accumulates and self.mode.averages and degree != self.reductions.degree:
            raise Refused("gradients of a loss that is a sum over samples are added to those of one that is not")
        self.reductions.degree = degree
        return False

    def _gradient(self, a: Node) -> None:
        source, number = a.args
        value = self.values[source]
        if value.kind == SHARDED:
            raise Refused("a gradient has the samples in one of its dims")
        if _is_accumulated(a, number):
            self.accumulates = True
            self._keep(a, self.new[source], value)
            return
        self.accumulates = False
        node = self._call(GRADIENT, (self.new[source], number), {})
        node.meta["grad"] = attrs.evolve(value, degree=self.reductions.degree if value.of_batch else 0)
        node.meta["val"] = source.meta["val"]
        # its division, if any, is done: a later backward adds to it as to one that does not depend on the batch
        self._keep(a, node, BatchValue(FLAT if number in self.sharded else REPLICATED, is_gradient=True))

    def _stepped(self, a: Node) -> None:
        params: Any
        params, grads, number = a.args
        for grad in grads:
            if self.values[grad].kind not in (REPLICATED, FLAT) or self.values[grad].share:
                raise Refused("an optimizer steps with a value that is no gradient")
        inputs = [_input_of(p) for p in params]
        node = self._call(STEPPED, ([], [self.new[g] for g in grads], number), {})
        node.meta["numbers"] = [self.numbers[x] for x in inputs]
        self.stepped[a] = [self.new[x] for x in inputs]
        self._keep(a, node, [BatchValue() for _ in params])

    def _write(self, a: Node) -> None:
        target, source = a.args[:2]
        made, value = self.reductions.plain(self.new[source], self.values[source])
        was = self.values[target]
        if (value.kind, value.dim, value.outer) != (
            was.kind,
            was.dim,
            was.outer,
        ) and REPLICATED != value.kind == was.kind:
            raise Refused("it writes a value to a tensor that has the samples in another dim")
        if value.kind != was.kind:
            raise Refused(f"it writes a value that is {value.kind} to a tensor that is {was.kind}")
        if value.kind == REPLICATED and self._is_stepped(source):
            return
        self._keep(a, self._call(aten.copy_.default, (self.new[target], made), {}), value)

    def _is_stepped(self, source: Any) -> bool:
        """Whether a value is what an optimizer step left."""
        while source.target in (aten.copy.default, aten.detach.default):
            source = source.args[1] if source.target is aten.copy.default else source.args[0]
        return source.target is operator.getitem and source.args[0] in self.stepped

    def _result(self, x: Any) -> Any:
        return self.reductions.plain(self.new[x], self.values[x])[0] if isinstance(x, fx.Node) else x

    # -- lists --------------------------------------------------------------------------------------------------------

    def _foreach(self, a: Node, b: Node) -> None:
        """An operation on lists of tensors: elementwise, or a norm of each."""
        target: Any = a.target
        name = target._schema.name.partition("_foreach_")[2]
        lists = [x for x in a.args if isinstance(x, list | tuple)]
        options = {"ord": next((x for x in a.args[1:] if isinstance(x, int | float)), 2)}
        found: list[BatchValue] = []
        for i, result in enumerate(self._results(a)):
            nodes = [x[i] for x in lists if isinstance(x[i], fx.Node)] + [x for x in a.args if isinstance(x, fx.Node)]
            operands = [Operand(self.values[x], tuple(x.meta["val"].shape)) for x in nodes]
            own = {"norm": "linalg_vector_norm"}.get(name, name)
            try:
                found += infer(own, operands, options, [result], self.mode, is_pointwise=name != "norm")
            except OperandFirst:
                raise Refused("it takes a list of values that are not reduced") from None
        local = mapped(lambda x, _: self.new[x] if isinstance(x, fx.Node) else x, list(a.args), list(b.args))
        self._keep(a, self._call(a.target, local, dict(a.kwargs)), found)


def _grown(value: BatchValue, power: int) -> BatchValue:
    """A value divided by `power` times the number of samples: each rank divides by its own number."""
    degree = None if value.degree is None else value.degree - power
    return attrs.evolve(value, share=value.share + power, degree=degree) if power else value


def _is_backward(node: Any) -> bool:
    return bool((node.meta.get("custom") or {}).get("backward"))


def _is_list(a: Node) -> bool:
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


def _at(given: dict[str, Any], place: tuple[str, Any]) -> Node:
    key, i = place
    found: Node = given[key] if i is None else given[key][i]
    return found


def _is_accumulated(a: Node, number: Any) -> bool:
    """Whether a gradient is only added to that of a later backward."""
    for user in a.users:
        if user.target not in (aten.add.Tensor, aten.detach.default) or not user.users:
            return False
        if not all((n.target is GRADIENT and n.args[1] == number) or _is_accumulated(user, number) for n in user.users):
            return False
    return bool(a.users)


def _input_of(node: Node) -> Node:
    """Return the input that a parameter is."""
    while node.op != "placeholder":
        if node.target not in (aten.copy.default, aten.detach.default, aten.alias.default):
            raise Refused("an optimizer steps a tensor that is no parameter")
        node = node.args[0]
    return node


def _refusal(a: Node, why: str, builder: _Builder) -> RuleError:
    facts = {"at": where(a), "operation": str(a.target)}
    if _is_backward(a):
        facts["in"] = "its backward"
    for i, x in enumerate(a.all_input_nodes[:6]):
        value = builder.values.get(x)
        if isinstance(value, BatchValue):
            facts[f"operand {i}"] = f"{by(tuple(x.meta['val'].shape))}, {value}"
    return RuleError(
        f"a part of the batch is not enough: {why}",
        facts,
        [
            "compute it from values of one sample each, or of sums over samples",
            "train with data_parallel or fully_shard",
        ],
    )
