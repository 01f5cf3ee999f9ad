"""The graph that one rank runs: the traced step, with this rank's sizes and a reduction wherever a value needs one.

It goes through the nodes in order and asks `shardtensor.rules.batch` what each value is. A partial value is reduced
before the first operation that is not linear in it; a gradient is reduced where its backward ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set
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
    ReduceFirst,
    Refused,
    Result,
    ScaleFirst,
    infer,
)
from shardtensor.spmd.markers import GRADIENT, STEPPED
from shardtensor.spmd.sizes import Part, batch_dims, growth, mapped, paired, where
from shardtensor.spmd.tracing import Trace

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
_CHECKS = {aten._assert_async.msg, aten._assert_async.default}
_BACKWARDS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
_MEANS_OF_LABELS = _BACKWARDS | {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_DRAWS = {"bernoulli", "rand", "randn", "randint", "normal", "rand_like", "randn_like", "native_dropout", "randperm"}


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
    builder = _Builder(part, mode, group_name, list(inputs), sharded)
    for a, b in paired(whole.graph.graph, doubled.graph.graph):
        try:
            builder.add(a, b)
        except Refused as refused:
            raise _refusal(a, str(refused), builder) from None
    return LocalGraph(builder.graph, builder.described)


class _Builder:
    def __init__(
        self, part: Part, mode: BatchMode, group_name: str, inputs: list[BatchValue], sharded: Set[int]
    ) -> None:
        self.part, self.mode, self.group_name, self.inputs = part, mode, group_name, inputs
        self.sharded = sharded
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.values: dict[fx.Node, Any] = {}  # of the trace's nodes; lists for several results
        self.reduced: dict[fx.Node, tuple[fx.Node, BatchValue]] = {}
        self.scaled: dict[fx.Node, tuple[fx.Node, BatchValue]] = {}
        self.described: dict[fx.Node, BatchValue] = {}
        self.twin: dict[fx.Node, fx.Node] = {}
        self.numbers: dict[fx.Node, int] = {}  # of inputs
        self.stepped: dict[fx.Node, list[Any]] = {}
        self.counts: dict[fx.Node, fx.Node] = {}  # of labels that are not ignored, for losses

    # -- nodes --------------------------------------------------------------------------------------------------------

    def add(self, a: fx.Node, b: fx.Node) -> None:
        self.twin[a] = b
        self.at = a
        if a.op == "placeholder":
            value = self.inputs.pop(0)
            self.numbers[a] = len(self.numbers)
            self._keep(a, self.graph.placeholder(a.name), value)
        elif a.op == "get_attr":
            self._keep(a, self.graph.get_attr(str(a.target)), BatchValue())
        elif a.op == "output":
            self.graph.output([self._result(x) for x in a.args[0]])
        elif a.target.__module__ == "_operator":
            source, i = a.args
            if a.target.__name__ != "getitem":
                raise Refused(f"there is no rule for `{a.target.__name__}`")
            if source.target is STEPPED:  # the optimizer writes to the parameter itself
                self._keep(a, self.stepped[source][i], BatchValue())
                return
            made = self.new[source]
            if isinstance(made, tuple):
                self.new[a], self.values[a] = made[i], self.values[source][i]
                return
            self._keep(a, self._call(a, a.target, (made, i), {}), self.values[source][i])
        elif a.target is GRADIENT:
            self._gradient(a)
        elif a.target is STEPPED:
            self._stepped(a)
        elif a.target is aten.copy_.default:
            self._write(a)
        elif a.target in (aten.detach.default, aten.alias.default):  # nothing in the graph needs a gradient
            self.new[a], self.values[a] = self.new[a.args[0]], self.values[a.args[0]]
        elif "profiler" in str(a.target):
            return
        elif a.target in _CHECKS:  # each rank checks its part
            self._call(a, a.target, (self.new[a.args[0]], *a.args[1:]), {})
        elif a.target in _MEANS_OF_LABELS and a.args[4 if a.target in _BACKWARDS else 3] == 1 and self._is_sharded(a):
            self._mean_of_labels(a, b)
        elif str(a.target).startswith("aten._foreach_"):
            self._foreach(a, b)
        else:
            self._operation(a, b)

    def _keep(self, a: fx.Node, node: fx.Node, value: Any) -> None:
        self.new[a], self.values[a] = node, value
        if isinstance(value, BatchValue):
            self.described[node] = value

    def _call(self, a: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta["custom"] = a.meta.get("custom") or {}
        return node

    def _operation(self, a: fx.Node, b: fx.Node) -> None:
        names = [argument.name for argument in a.target._schema.arguments]
        name = a.target._schema.name.partition("::")[2]
        given = dict(zip(names, a.args, strict=False)) | dict(a.kwargs)
        other = dict(zip(names, b.args, strict=False)) | dict(b.kwargs)
        places = [(key, i) for key, value in given.items() for i in _tensor_places(value)]
        nodes = {place: _at(given, place) for place in places}
        changed: dict[tuple[str, Any], tuple[Any, BatchValue]] = {}
        options = {key: value for key, value in given.items() if not _has_nodes(value)}
        optional = _optional(name, given, places)
        is_pointwise = torch.Tag.pointwise in a.target.tags
        while True:
            operands = [
                None if place is None else self._operand(nodes[place], changed.get(place)) for place in optional
            ]
            try:
                found = infer(
                    name,
                    operands,
                    options,
                    self._results(a),
                    self.mode,
                    is_pointwise=is_pointwise,
                    in_backward=bool((a.meta.get("custom") or {}).get("backward")),
                )
                break
            except ReduceFirst as needed:
                place = optional[needed.args[0]]
                changed[place] = self._reduce(nodes[place], *changed.get(place, ()))
            except ScaleFirst as needed:
                place = optional[needed.args[0]]
                changed[place] = self._scale(nodes[place], *changed.get(place, ()))
        if name == "arange" and found[0].kind == SHARDED:
            node = self._arange(a, given)
        else:
            local = {key: self._local(a, key, given[key], other[key], changed, name) for key in given}
            if name in ("index", "_unsafe_index", "index_put"):
                self._own_numbers(local, given, operands)
            args = [local[key] for key in names if key in given and key not in a.kwargs]
            node = self._call(a, a.target, args, {key: local[key] for key in a.kwargs})
            found = self._by_numbers(name, a, b, given, other, found)
        if name in _DRAWS and found[0].kind == REPLICATED:
            node = self._waited(a, c10d.broadcast.default, node, 0, self.group_name)
        self._keep(a, node, found if _is_list(a) else found[0])

    def _operand(self, node: fx.Node, changed: tuple[Any, BatchValue] | None) -> Operand:
        whole, doubled = node.meta["val"], self.twin[node].meta["val"]
        value = self.values[node] if changed is None else changed[1]
        return Operand(value, tuple(whole.shape), batch_dims(whole, doubled))

    def _results(self, a: fx.Node) -> list[Result]:
        whole, doubled = a.meta["val"], self.twin[a].meta["val"]
        pairs = zip(whole, doubled, strict=True) if _is_list(a) else [(whole, doubled)]
        return [
            Result(tuple(x.shape), batch_dims(x, y)) if isinstance(x, torch.Tensor) else Result(()) for x, y in pairs
        ]

    # -- losses that divide by the number of labels that count ----------------------------------------------------------

    def _is_sharded(self, a: fx.Node) -> bool:
        return any(isinstance(self.values[x], BatchValue) and self.values[x].kind == SHARDED for x in a.all_input_nodes)

    def _mean_of_labels(self, a: fx.Node, b: fx.Node) -> None:
        """Cross entropy divides by the labels that are not ignored: by this rank's share of those of all ranks."""
        if a.target in _BACKWARDS:
            *args, total = a.args
            forward = total.args[0]  # type: ignore[union-attr]
            self.new[total], self.values[total] = self.counts[forward], BatchValue()
            self._operation(a, b)
            return
        x, labels, weight, _, ignored = a.args
        summed = self._call(a, a.target, (self.new[x], self.new[labels], _new(self.new, weight), 2, ignored), {})
        first = self._call(a, operator.getitem, (summed, 0), {})
        count = self._call(a, operator.getitem, (summed, 1), {})
        total = self._waited(a, c10d.all_reduce.default, count, "sum", self.group_name)
        target = (aten.div.Tensor, self.part.ranks) if self.part.is_even else (aten.mul.Tensor, float(self.part.share))
        count = self._call(a, target[0], (total, target[1]), {})
        self.counts[a] = count
        loss = self._call(a, aten.div.Tensor, (first, count), {})
        self.new[a] = (loss, count)
        self.values[a] = [BatchValue(PARTIAL, share=1), BatchValue()]
        self.described[loss] = self.values[a][0]

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _local(
        self, a: fx.Node, key: str, whole: Any, doubled: Any, changed: dict[Any, tuple[Any, BatchValue]], name: str
    ) -> Any:
        """Return an argument for this rank."""
        kind = next(str(x.type) for x in a.target._schema.arguments if x.name == key)
        is_value = "number" in kind or "Scalar" in kind or "float" in kind
        numbered = iter(range(1 << 30))

        def one(x: Any, y: Any) -> Any:
            if isinstance(x, fx.Node):
                place = (key, next(numbered) if isinstance(whole, list | tuple) else None)
                return changed[place][0] if place in changed else self.new[x]
            if isinstance(whole, list | tuple):
                next(numbered)
            if isinstance(x, bool) or not isinstance(x, int | float) or x == y:
                return x
            if is_value:
                power = growth(x, y)
                if power and name in ("mul", "div"):
                    local = x * self.part.share**power if isinstance(x, int) else x * float(self.part.share) ** power
                    return _plain(local)
                return x
            size = self.part.size(x, y)
            if size is None:
                raise Refused(f"the number {x} is neither a part of the batch size nor independent of it")
            return size

        return mapped(one, whole, doubled)

    def _by_numbers(
        self, name: str, a: fx.Node, b: fx.Node, given: dict[str, Any], other: dict[str, Any], found: list[BatchValue]
    ) -> list[BatchValue]:
        """Change the exponents of a product with a number that depends on the batch."""
        x, y = given.get("other"), other.get("other")
        if name not in ("mul", "div") or isinstance(x, fx.Node) or x == y:
            return found
        power = growth(x, y) or 0
        sign = 1 if name == "div" else -1
        return [
            attrs.evolve(value, share=value.share + sign * power, degree=value.degree - sign * power) for value in found
        ]

    def _arange(self, a: fx.Node, given: dict[str, Any]) -> fx.Node:
        start, step = given.get("start", 0), given.get("step", 1)
        whole, doubled = a.meta["val"], self.twin[a].meta["val"]
        count = self.part.size(len(whole), len(doubled))
        first = self.part.start * len(whole) // self.part.total
        if count is None:
            raise Refused("it counts neither the samples nor the same for each")
        kwargs = {key: value for key, value in given.items() if key not in ("start", "end", "step")}
        begin = start + first * step
        return self._call(a, aten.arange.start_step, (begin, begin + count * step, step), kwargs)

    def _own_numbers(self, local: dict[str, Any], given: dict[str, Any], operands: Sequence[Operand | None]) -> None:
        """Let this rank look up its samples by their place in its part."""
        x = operands[0]
        if x is None or x.value.kind != SHARDED:
            return
        places = list(local["indices"])
        own = given["indices"][x.value.dim] if x.value.dim < len(places) else None
        if own is not None and self.values[own].is_iota:
            whole = own.meta["val"]
            first = self.part.start * max(whole.shape) // self.part.total
            if first:
                places[x.value.dim] = self._call(self.at, aten.sub.Tensor, (places[x.value.dim], first), {})
        local["indices"] = places

    # -- changes of a value ---------------------------------------------------------------------------------------------

    def _factor(self, value: BatchValue) -> float:
        factor = self.part.share**value.share
        if self.mode.divides(value):
            factor *= _power(self.part.ranks, -value.degree)
        return _plain(factor)

    def _scale(self, x: fx.Node, node: Any = None, value: BatchValue | None = None) -> tuple[fx.Node, BatchValue]:
        """Return a value times its factor, which then is 1."""
        if node is None and x in self.scaled:
            return self.scaled[x]
        node, was = (self.new[x], self.values[x]) if node is None else (node, value)
        assert was is not None
        factor = self._factor(was)
        found = attrs.evolve(was, share=0, degree=0 if self.mode.divides(was) else was.degree)
        made = node if factor == 1 else self._call(self.at, aten.mul.Tensor, (node, factor), {})
        self.described[made] = found
        self.scaled[x] = made, found
        return made, found

    def _reduce(self, x: fx.Node, node: Any = None, value: BatchValue | None = None) -> tuple[fx.Node, BatchValue]:
        """Return the sum of a partial value over the ranks, replicated."""
        if node is None and x in self.reduced:
            return self.reduced[x]
        node, was = (self.new[x], self.values[x]) if node is None else (node, value)
        assert was is not None
        made = self._all_reduced(node, was, x.meta["val"].dtype)
        found = BatchValue(degree=was.degree, is_gradient=was.is_gradient)
        self.described[made] = found
        self.reduced[x] = made, found
        return made, found

    def _all_reduced(self, node: fx.Node, value: BatchValue, dtype: torch.dtype) -> fx.Node:
        power = value.power
        if power in (float("inf"), float("-inf")):
            sent = (
                self._call(self.at, aten._to_copy.default, (node,), {"dtype": torch.int32})
                if dtype == torch.bool
                else node
            )
            made = self._waited(self.at, c10d.all_reduce.default, sent, "max" if power > 0 else "min", self.group_name)
            return (
                self._call(self.at, aten._to_copy.default, (made,), {"dtype": dtype}) if dtype == torch.bool else made
            )
        if power != 1:
            sent = self._call(self.at, aten.pow.Tensor_Scalar, (node, power), {})
            made = self._waited(self.at, c10d.all_reduce.default, sent, "sum", self.group_name)
            return self._call(self.at, aten.pow.Tensor_Scalar, (made, 1 / power), {})
        factor = self._factor(value)
        sent = node if factor == 1 else self._call(self.at, aten.mul.Tensor, (node, factor), {})
        return self._waited(self.at, c10d.all_reduce.default, sent, "sum", self.group_name)

    def _waited(self, a: fx.Node, target: Any, *args: Any) -> fx.Node:
        return self._call(a, c10d.wait_tensor.default, (self._call(a, target, args, {}),), {})

    # -- gradients, steps, results ----------------------------------------------------------------------------------------

    def _gradient(self, a: fx.Node) -> None:
        source, number = a.args
        value = self.values[source]
        if value.kind == SHARDED:
            raise Refused("a gradient has the samples in one of its dims")
        if _is_accumulated(a, number):
            self._keep(a, self.new[source], value)
            return
        node = self._call(a, GRADIENT, (self.new[source], number), {})
        node.meta["grad"] = value
        node.meta["val"] = source.meta["val"]
        found = BatchValue(FLAT if number in self.sharded else REPLICATED, degree=0, is_gradient=True)
        self._keep(a, node, found)

    def _stepped(self, a: fx.Node) -> None:
        params, grads, number = a.args
        for grad in grads:
            if self.values[grad].kind not in (REPLICATED, FLAT):
                raise Refused("an optimizer steps with a value that is no gradient")
        inputs = [_input_of(p) for p in params]
        node = self._call(a, STEPPED, ([], [self.new[g] for g in grads], number), {})
        node.meta["numbers"] = [self.numbers[x] for x in inputs]
        self.stepped[a] = [self.new[x] for x in inputs]
        self._keep(a, node, [BatchValue() for _ in params])

    def _write(self, a: fx.Node) -> None:
        target, source = a.args[:2]
        value = self.values[source]
        made = self.new[source]
        if value.kind == PARTIAL:
            made, value = self._reduce(source)
        elif value.share:
            made, value = self._scale(source)
        if value.kind != self.values[target].kind:
            raise Refused(f"it writes a value that is {value.kind} to a tensor that is {self.values[target].kind}")
        if value.kind == REPLICATED and _is_stepped(source):
            return
        self._keep(a, self._call(a, aten.copy_.default, (self.new[target], made), {}), value)

    def _result(self, x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return x
        value = self.values[x]
        if value.kind == PARTIAL:
            return self._reduce(x)[0]
        return self._scale(x)[0] if value.share else self.new[x]

    # -- lists ------------------------------------------------------------------------------------------------------------

    def _foreach(self, a: fx.Node, b: fx.Node) -> None:
        """An operation on lists of tensors: elementwise, or a norm of each."""
        name = a.target._schema.name.partition("_foreach_")[2]
        lists = [x for x in a.args if isinstance(x, list | tuple)]
        if name not in _FOREACH or (a.args != b.args and any(not isinstance(x, list | tuple) for x in a.args)):
            pass
        found = []
        results = self._results(a)
        for i, result in enumerate(results):
            operands = [self._operand(x[i], None) for x in lists if isinstance(x[i], fx.Node)]
            operands += [self._operand(x, None) for x in a.args if isinstance(x, fx.Node)]
            options = {"ord": next((x for x in a.args[1:] if isinstance(x, int | float)), 2)}
            own = {"norm": "linalg_vector_norm"}.get(name, name)
            try:
                found += infer(own, operands, options, [result], self.mode, is_pointwise=name != "norm")
            except (ReduceFirst, ScaleFirst):
                raise Refused("it takes a list of values that are not reduced") from None
        local = mapped(lambda x, _: self.new[x] if isinstance(x, fx.Node) else x, list(a.args), list(b.args))
        self._keep(a, self._call(a, a.target, local, dict(a.kwargs)), found)


_FOREACH = {"norm", "mul", "add", "div", "sub", "mul_", "clamp_max", "sqrt", "neg"}


def _is_list(a: fx.Node) -> bool:
    return isinstance(a.meta.get("val"), list | tuple)


def _has_nodes(value: Any) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, list | tuple) and any(map(_has_nodes, value)))


def _new(new: dict[fx.Node, Any], x: Any) -> Any:
    return new[x] if isinstance(x, fx.Node) else x


def _tensor_places(value: Any) -> list[Any]:
    if isinstance(value, fx.Node):
        return [None]
    if isinstance(value, list | tuple):
        return [i for i, x in enumerate(value) if isinstance(x, fx.Node)]
    return []


def _at(given: dict[str, Any], place: tuple[str, Any]) -> fx.Node:
    key, i = place
    found: fx.Node = given[key] if i is None else given[key][i]
    return found


def _optional(name: str, given: dict[str, Any], places: list[tuple[str, Any]]) -> list[Any]:
    """Return the places of the operands; for indices, with None where a dim is kept."""
    if name not in ("index", "_unsafe_index", "index_put", "_unsafe_index_put"):
        return list(places)
    found: list[Any] = [("self", None)]
    found += [("indices", i) if isinstance(x, fx.Node) else None for i, x in enumerate(given["indices"])]
    return found + ([("values", None)] if "values" in given else [])


def _is_accumulated(a: fx.Node, number: Any) -> bool:
    """Whether a gradient is only added to that of a later backward."""
    users = list(a.users)
    if not users:
        return False
    for user in users:
        if user.target not in (aten.add.Tensor, aten.detach.default):
            return False
        if not all((n.target is GRADIENT and n.args[1] == number) or _is_accumulated(user, number) for n in user.users):
            return False
        if not user.users:
            return False
    return True


def _input_of(node: fx.Node) -> fx.Node:
    """Return the input that a parameter is."""
    while node.op != "placeholder":
        if node.target is aten.copy.default or node.target is aten.detach.default or node.target is aten.alias.default:
            node = node.args[0]  # type: ignore[assignment]
        else:
            raise Refused("an optimizer steps a tensor that is no parameter")
    return node


def _is_stepped(source: fx.Node) -> bool:
    """Whether a value is what an optimizer step left."""
    while source.target in (aten.copy.default, aten.detach.default):
        source = source.args[1] if source.target is aten.copy.default else source.args[0]  # type: ignore[assignment]
    return source.target.__class__ is not str and (
        getattr(source.target, "__name__", "") == "getitem" and source.args[0].target is STEPPED  # type: ignore[union-attr]
    )


def _power(base: int, exponent: int) -> Any:
    from fractions import Fraction

    return Fraction(base) ** exponent


def _plain(x: Any) -> float:
    if x == int(x):
        return int(x) if isinstance(x, int) else float(x)
    return float(x)


def _refusal(a: fx.Node, why: str, builder: _Builder) -> RuleError:
    facts = {"at": where(a), "operation": str(a.target)}
    if (a.meta.get("custom") or {}).get("backward"):
        facts["in"] = "its backward"
    for i, x in enumerate(a.all_input_nodes[:6]):
        value = builder.values.get(x)
        if isinstance(value, BatchValue):
            facts[f"operand {i}"] = f"{' x '.join(map(str, x.meta['val'].shape)) or 'one number'}, {value}"
    return RuleError(
        f"a part of the batch is not enough: {why}",
        facts,
        [
            "compute it from values of one sample each, or of sums over samples",
            "train with data_parallel or fully_shard",
        ],
    )


Rewrite = Callable[[fx.Graph], None]
