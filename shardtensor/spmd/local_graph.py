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
    Refused,
    sizes_text,
)
from shardtensor.rules.batch_infer import infer
from shardtensor.spmd.local_operations import Operations
from shardtensor.spmd.markers import CHECKS, GRADIENT, STEPPED
from shardtensor.spmd.sizes import BatchPart, map_pairs, paired, where
from shardtensor.spmd.tracing import Trace

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
_LABEL_BACKWARDS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
_LABEL_LOSSES = _LABEL_BACKWARDS | {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


@attrs.define(eq=False)
class LocalGraph:
    """What a rank runs.

    Attributes:
        graph: inputs as the trace's; GRADIENT nodes stand where gradients are to be reduced, STEPPED ones where
            optimizers step.
        values: what each node is, for `explain`.
    """

    graph: fx.Graph
    values: dict[fx.Node, BatchValue]


def localize(
    whole: Trace,
    doubled: Trace,
    part: BatchPart,
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
    builder = _Builder(part, mode, group_name, list(inputs), sharded, whole.count, (whole.graph, doubled.graph))
    for a, b in paired(whole.graph.graph, doubled.graph.graph):
        try:
            builder.add(a, b)
        except Refused as refused:
            raise _refusal(a, str(refused), builder) from None
    return LocalGraph(builder.graph, builder.reductions.described)


class _Builder(Operations):
    def __init__(
        self,
        part: BatchPart,
        mode: BatchMode,
        group_name: str,
        inputs: list[BatchValue],
        sharded: Set[int],
        count: int,
        attributes: tuple[torch.nn.Module, torch.nn.Module],
    ) -> None:
        super().__init__(part, mode, group_name)
        self.inputs, self.sharded, self.count, self.attributes = inputs, sharded, count, attributes
        self.numbers: dict[fx.Node, int] = {}  # of inputs
        self.counts: dict[fx.Node, fx.Node] = {}  # of labels that are not ignored, for losses
        self.was_backward = self.starts_backward = self.accumulates = False
        self.losses: list[int | None] = []  # the degrees of those of the backward that begins

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def add(self, a: fx.Node, b: fx.Node) -> None:
        """Add what a node of the trace is on this rank; `b` is its twin in the trace of twice as many samples."""
        self.twin[a] = b
        self.reductions.custom = a.meta.get("custom") or {}
        if a.op == "placeholder":
            value = self.inputs.pop(0)
            self.numbers[a] = len(self.numbers)
            node = self.graph.placeholder(a.name)
            node.meta["of_batch"] = value.kind == SHARDED
            self.keep(a, node, attrs.evolve(value, of_batch=value.kind == SHARDED))
        elif a.op == "get_attr":
            self._constant(a, b)
        elif a.op == "output":
            outputs: Any = a.args[0]
            self.graph.output([self._result(x, i < self.count) for i, x in enumerate(outputs)])
        else:
            self._call_function(a, b)

    def _call_function(self, a: fx.Node, b: fx.Node) -> None:
        target: Any = a.target
        is_seed = self._finds_loss(a)
        if target.__module__ == "_operator":
            self.item(a)
        elif target is GRADIENT:
            self._gradient(a)
        elif target is STEPPED:
            self._stepped(a)
        elif target is aten.copy_.default:
            self._write(a)
        elif target in (aten.detach.default, aten.alias.default):  # nothing in the graph needs a gradient
            self.new[a], self.values[a] = self.new[a.args[0]], self.values[a.args[0]]
        elif target in CHECKS:  # each rank checks its part
            self.call(target, (self.new[a.args[0]], *a.args[1:]), {})
        elif "profiler" in str(target):
            return
        elif target in _LABEL_LOSSES and self._is_mean_of_labels(a):
            self._mean_of_labels(a, b)
        elif str(target).startswith("aten._foreach_"):
            self._foreach(a, b)
        else:
            self.operation(a, b)
        if is_seed:
            self.values[a] = attrs.evolve(self.values[a], is_gradient=True)

    def _constant(self, a: fx.Node, b: fx.Node) -> None:
        """A tensor made from numbers: the one of the whole batch, unless it has an element for each sample."""
        x, y = (operator.attrgetter(str(n.target))(m) for n, m in zip((a, b), self.attributes, strict=True))
        if x.shape != y.shape:
            raise Refused(f"a tensor of {sizes_text(tuple(x.shape))} numbers is made from the batch size")
        a.meta.setdefault("val", x)
        b.meta.setdefault("val", y)
        self.keep(a, self.graph.get_attr(str(a.target)), BatchValue())

    # -- losses that divide by the number of labels that count ---------------------------------------------------------

    def _is_mean_of_labels(self, a: fx.Node) -> bool:
        is_mean = a.args[4 if a.target in _LABEL_BACKWARDS else 3] == 1
        return bool(is_mean) and any(getattr(self.values[x], "kind", "") == SHARDED for x in a.all_input_nodes)

    def _mean_of_labels(self, a: fx.Node, b: fx.Node) -> None:
        """Cross entropy divides by the labels that are not ignored: by this rank's share of those of all ranks."""
        if a.target in _LABEL_BACKWARDS:
            total: Any = a.args[6]
            self.new[total], self.values[total] = self.counts[total.args[0]], BatchValue()
            self.by_rule(a, b)
            return
        x, labels, weight, _, ignored = a.args
        assert isinstance(x, fx.Node) and isinstance(labels, fx.Node)
        is_sharded = [self.values[n].kind == SHARDED and self.values[n].dim == 0 for n in (x, labels)]
        if not all(is_sharded) or self.values[x].outer != self.values[labels].outer:
            raise Refused("its operands have the samples in different dims")
        own, value = self.reductions.scaled(self.new[x], self.values[x])
        args = (own, self.new[labels], self.new[weight] if isinstance(weight, fx.Node) else None, 2, ignored)
        summed = self.call(a.target, args, {})
        first = self.call(operator.getitem, (summed, 0), {})
        if isinstance(weight, fx.Node):
            count = self.call(operator.getitem, (summed, 1), {})
        else:  # from the labels alone, so that it is sent while forward runs
            counted = self.call(aten.ne.Scalar, (self.new[labels], ignored), {})
            count = self.call(aten.sum.default, (counted,), {"dtype": x.meta["val"].dtype})
        count.meta["number"] = x.meta["val"].dtype
        total = self.reductions.waited(c10d.all_reduce.default, count, "sum", self.group_name)
        is_even = self.part.is_even
        scale = (aten.div.Tensor, self.part.ranks) if is_even else (aten.mul.Tensor, float(self.part.share))
        count = self.counts[a] = self.call(scale[0], (total, scale[1]), {})
        loss = self.call(aten.div.Tensor, (first, count), {})
        loss.meta["number"] = x.meta["val"].dtype
        self.new[a] = (loss, count)
        self.values[a] = [BatchValue(PARTIAL, share=1, of_batch=True, is_gradient=value.is_gradient), BatchValue()]
        self.reductions.described[loss] = self.values[a][0]

    # -- gradients, steps, results -------------------------------------------------------------------------------------

    def _finds_loss(self, a: fx.Node) -> bool:
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

    def _gradient(self, a: fx.Node) -> None:
        source, number = a.args
        value = self.values[source]
        if value.kind == SHARDED:
            raise Refused("a gradient has the samples in one of its dims")
        if _is_accumulated(a, number):
            self.accumulates = True
            self.keep(a, self.new[source], value)
            return
        self.accumulates = False
        node = self.call(GRADIENT, (self.new[source], number), {})
        node.meta["grad"] = attrs.evolve(value, degree=self.reductions.degree if value.of_batch else 0)
        node.meta["val"] = source.meta["val"]  # type: ignore[union-attr]
        # its division, if any, is done: a later backward adds to it as to one that does not depend on the batch
        self.keep(a, node, BatchValue(FLAT if number in self.sharded else REPLICATED, is_gradient=True))

    def _stepped(self, a: fx.Node) -> None:
        params: Any
        params, grads, number = a.args
        for grad in grads:  # type: ignore[union-attr]
            if self.values[grad].kind not in (REPLICATED, FLAT) or self.values[grad].share:
                raise Refused("an optimizer steps with a value that is no gradient")
        inputs = [_input_of(p) for p in params]
        node = self.call(STEPPED, ([], [self.new[g] for g in grads], number), {})  # type: ignore[union-attr]
        node.meta["numbers"] = [self.numbers[x] for x in inputs]
        self.stepped[a] = [self.new[x] for x in inputs]
        self.keep(a, node, [BatchValue() for _ in params])

    def _write(self, a: fx.Node) -> None:
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
        self.keep(a, self.call(aten.copy_.default, (self.new[target], made), {}), value)

    def _is_stepped(self, source: Any) -> bool:
        """Whether a value is what an optimizer step left."""
        while source.target in (aten.copy.default, aten.detach.default):
            source = source.args[1] if source.target is aten.copy.default else source.args[0]
        return source.target is operator.getitem and source.args[0] in self.stepped

    def _result(self, x: Any, is_returned: bool) -> Any:
        if is_returned and self.values[x].kind == FLAT:
            raise Refused("it returns a value of which each rank has a shard: return the gradient as it is")
        return self.reductions.plain(self.new[x], self.values[x])[0] if isinstance(x, fx.Node) else x

    # -- lists ---------------------------------------------------------------------------------------------------------

    def _foreach(self, a: fx.Node, b: fx.Node) -> None:
        """An operation on lists of tensors: elementwise, or a norm of each."""
        target: Any = a.target
        name = target._schema.name.partition("_foreach_")[2]
        lists: list[Any] = [x for x in a.args if isinstance(x, list | tuple)]
        options = {"ord": next((x for x in a.args[1:] if isinstance(x, int | float)), 2)}
        found: list[BatchValue] = []
        for i, result in enumerate(self.results(a)):
            nodes: list[fx.Node] = [x[i] for x in lists if isinstance(x[i], fx.Node)] + [
                x for x in a.args if isinstance(x, fx.Node)
            ]
            operands = [Operand(self.values[x], tuple(x.meta["val"].shape)) for x in nodes]
            own = {"norm": "linalg_vector_norm"}.get(name, name)
            try:
                found += infer(own, operands, options, [result], self.mode, is_pointwise=name != "norm")
            except OperandFirst:
                raise Refused("it takes a list of values that are not reduced") from None
        local = map_pairs(lambda x, _: self.new[x] if isinstance(x, fx.Node) else x, list(a.args), list(b.args))
        self.keep(a, self.call(a.target, local, dict(a.kwargs)), found)


def _is_backward(node: Any) -> bool:
    return bool((node.meta.get("custom") or {}).get("backward"))


def _is_accumulated(a: fx.Node, number: Any) -> bool:
    """Whether a gradient is only added to that of a later backward."""
    for user in a.users:
        if user.target not in (aten.add.Tensor, aten.detach.default) or not user.users:
            return False
        if not all((n.target is GRADIENT and n.args[1] == number) or _is_accumulated(user, number) for n in user.users):
            return False
    return bool(a.users)


def _input_of(node: fx.Node) -> fx.Node:
    """Return the input that a parameter is."""
    while node.op != "placeholder":
        if node.target not in (aten.copy.default, aten.detach.default, aten.alias.default):
            raise Refused("an optimizer steps a tensor that is no parameter")
        node = node.args[0]  # type: ignore[assignment]
    return node


def _refusal(a: fx.Node, why: str, builder: _Builder) -> RuleError:
    facts = {"at": where(a), "operation": str(a.target)}
    if _is_backward(a):
        facts["in"] = "its backward"
    for i, x in enumerate(a.all_input_nodes[:6]):
        value = builder.values.get(x)
        if isinstance(value, BatchValue):
            facts[f"operand {i}"] = f"{sizes_text(tuple(x.meta['val'].shape))}, {value}"
    return RuleError(
        f"a part of the batch is not enough: {why}",
        facts,
        [
            "compute it from values of one sample each, or of sums over samples",
            "train with data_parallel or fully_shard",
        ],
    )
