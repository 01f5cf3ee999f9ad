"""`infer`: what an operation of a train step returns on a rank that has a part of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs

from shardtensor.layout.layout import Shape
from shardtensor.rules import batch_indexing, batch_views  # noqa: F401  (they register rules)
from shardtensor.rules.batch import (
    FLAT,
    PARTIAL,
    REPLICATED,
    SHARDED,
    BatchCall,
    BatchMode,
    BatchValue,
    Operand,
    ReduceFirst,
    Refused,
    ResultShape,
    sizes_text,
)
from shardtensor.rules.batch_exponents import PRODUCTS, RULES, VIEWS, exponents_of, rule
from shardtensor.rules.batch_kernels import DRAWS, FILLS, KERNELS, LIKES, kernel, pointwise, unsummed
from shardtensor.rules.table import ROWS


def infer(
    name: str,
    operands: Sequence[Operand | None],
    options: Mapping[str, Any],
    results: Sequence[ResultShape],
    mode: BatchMode,
    *,
    is_pointwise: bool = False,
) -> list[BatchValue]:
    """Return what the results of one operation are.

    Args:
        name: of the aten operation, without its overload.
        operands: its tensor arguments in order; None for those not passed.
        options: its other arguments, by name, for the whole batch.
        results: the tensors that it returns.
        is_pointwise: whether each element of the result needs one element of each operand.

    Raises:
        OperandFirst: an operand must be changed first.
        Refused: there is no rule, or the operation mixes samples.

    Example:
        >>> batch = Operand(BatchValue(SHARDED, 0), (8, 4))
        >>> weight = Operand(BatchValue(), (4, 3))
        >>> [str(v) for v in infer("mm", [batch, weight], {}, [ResultShape((8, 3), (0,))], BatchMode())]
        ['sharded dim 0']
        >>> [str(v) for v in infer("sum", [batch], {"dim": [0]}, [ResultShape((4,))], BatchMode())]
        ['partial sum']
    """
    call = BatchCall(name, operands, options, results, mode, is_pointwise)
    found = _inferred(call)
    of_batch = any(value.of_batch for value in call.values) and name not in LIKES - {"fill"}  # of its shape only
    is_gradient = any(value.is_gradient for value in call.values)
    for i, value in enumerate(found):
        _check(call, i, value)
        whole = of_batch or value.kind != REPLICATED
        found[i] = attrs.evolve(value, is_gradient=is_gradient and value.kind != FLAT, of_batch=whole)
    return found


def _check(call: BatchCall, i: int, value: BatchValue) -> None:
    """A result grows with the batch if and only if it is sharded, and each block of its dim has all samples."""
    if i >= len(call.results) or value.kind == FLAT:
        return
    dim, shape = call.batch_dim(i), call.results[i].shape
    if value.kind == SHARDED:
        if dim != value.dim or shape[dim] % (value.outer * call.mode.samples):
            raise Refused(f"a result of {sizes_text(shape)} has no dim with the samples")
    elif dim is not None:
        raise Refused(f"a result of {sizes_text(shape)} depends on all samples")


def _inferred(call: BatchCall) -> list[BatchValue]:
    name, values = call.name, call.values
    if not values or name in FILLS or name in LIKES or name in DRAWS:
        return _made(call)
    if any(value.kind == FLAT for value in values):
        return [_on_flat_shards(call)]
    if all(value.kind == REPLICATED for value in values) and not any(result.batch_dims for result in call.results):
        share, degree = exponents_of(call)  # equal operands give equal results
        return [BatchValue(share=share, degree=degree) for _ in call.results]
    power = next((v.power for v in values if v.kind == PARTIAL and v.power != 1), 1)
    if power != 1 and name not in VIEWS and name not in _OF_POWERS:
        raise ReduceFirst(call.numbers[call.of_kind(PARTIAL)[0]])
    if name in VIEWS:
        return RULES["view"](call)
    if name in RULES:
        return RULES[name](call)
    if call.is_pointwise and name not in KERNELS:
        return [pointwise(call)]
    if name in KERNELS:
        return kernel(call)
    if name in ROWS and ROWS[name].pattern is not None:
        return [_row(call)]
    raise Refused(f"there is no rule for `{name}`")


_OF_POWERS = frozenset("linalg_vector_norm permute transpose t slice select cat stack split unbind".split())
"""Operations that take norms and maxima before they are reduced."""


def _made(call: BatchCall) -> list[BatchValue]:
    """Factories and random numbers: of the size of this rank's part."""
    name = call.name
    if name in DRAWS and call.values and not name.endswith("_like"):  # probabilities, means
        call.plain()
    if name == "fill" and len(call.values) > 1:  # with the value of a tensor
        call.plain(0)
    is_zero = "zero" in name or (name in _FULL and _fills_zero(call))
    like = next((v for v in call.values if v.kind == SHARDED), None) if name in LIKES | DRAWS else None
    found = []
    for i in range(len(call.results)):
        dim = call.batch_dim(i)
        is_uniform = name in FILLS or name in LIKES
        if dim is None:
            found.append(BatchValue(is_zero=is_zero))
        elif not (is_uniform or name in DRAWS or name == "arange") or name == "randperm":
            raise Refused(f"`{name}` makes values of all samples")
        else:
            outer = 1 if like is None else like.outer
            found.append(BatchValue(SHARDED, dim, outer, is_zero=is_zero, is_uniform=is_uniform, is_iota=_counts(call)))
    return found


def _fills_zero(call: BatchCall) -> bool:
    return len(call.values) < 2 and call.number("fill_value", "value", "s") == 0


_FULL = frozenset("full full_like new_full fill scalar_tensor".split())


def _counts(call: BatchCall) -> bool:
    return call.name == "arange" and (call.options.get("start", 0), call.options.get("step", 1)) == (0, 1)


def _on_flat_shards(call: BatchCall) -> BatchValue:
    """Of shards of gradients: elementwise with numbers and shards of the same parameter, norms and sums."""
    if call.name in ("linalg_vector_norm", "norm"):
        return BatchValue(PARTIAL, power=float(call.options.get("ord", 2)))
    if call.name == "sum" and not call.results[0].shape:
        return BatchValue(PARTIAL)
    if not (call.is_pointwise or call.name in ("detach", "clone", "alias", "_to_copy")):
        raise Refused("each rank has a shard of this gradient: only elementwise operations and norms take it")
    call.plain()
    if any(
        value.kind != FLAT and max(x.shape, default=1) != 1 for value, x in zip(call.values, call.tensors, strict=True)
    ):
        raise Refused("each rank has a shard of this gradient, and the other operand is whole")
    return BatchValue(FLAT)


@rule("all_reduce", "wait_tensor")
def _sent(call: BatchCall) -> list[BatchValue]:
    """Collectives of other axes of the mesh."""
    return [call.values[0]]


@rule("all_gather_into_tensor")
def _gathered(call: BatchCall) -> list[BatchValue]:
    """The parts of all ranks of another axis, end to end along the first dim."""
    value = call.values[0]
    if value.kind != SHARDED or value.dim:
        return [value]
    return [attrs.evolve(value, outer=value.outer * call.options["group_size"], is_iota=False)]


@rule("reduce_scatter_tensor", "all_to_all_single")
def _divided(call: BatchCall) -> list[BatchValue]:
    """Each rank of another axis sends an equal part of the first dim to each other one."""
    value = call.values[0]
    if value.kind != SHARDED or value.dim:
        return [value]
    is_scatter = call.name == "reduce_scatter_tensor"
    ranks = call.options["group_size"] if is_scatter else len(call.options["output_split_sizes"])
    if value.outer % ranks:
        raise Refused("ranks of another axis exchange parts of the samples")
    return [attrs.evolve(value, outer=value.outer // ranks, is_iota=False) if is_scatter else value]


@rule("embedding_dense_backward")
def _embedding_dense_backward(call: BatchCall) -> list[BatchValue]:
    """Each row of the table gets the sum of the gradients of the tokens that are it."""
    call.unscaled(1)
    if call.options.get("scale_grad_by_freq"):
        raise Refused("it counts how often the whole batch has each row (scale_grad_by_freq=True)")
    if call.of_kind(SHARDED):
        call.reduced(0)
        call.place()
        if len(call.of_kind(SHARDED)) != 2:
            raise Refused("its operands have the samples in different dims")
    value = call.values[0]
    return [BatchValue(PARTIAL, share=value.share)]


def _row(call: BatchCall) -> BatchValue:
    """An operation whose row in the table of sharding rules says what happens to each dim."""
    dim = call.options.get("dim")
    dims = (dim % max(len(call.tensors[0].shape), 1),) if isinstance(dim, int) else ()
    found = _rule_of(call.name, tuple(None if o is None else o.shape for o in call.operands), dims)
    if found is None or len(found.inputs) != len(call.tensors):
        raise Refused(f"there is no rule for `{call.name}` of these shapes")
    partial, sharded = call.of_kind(PARTIAL), call.of_kind(SHARDED)
    adds = call.name in _ADD_PRODUCTS
    if partial and (call.name not in PRODUCTS or sharded or len(partial) > 1 or adds):
        raise ReduceFirst(call.numbers[partial[0]])
    share, degree = unsummed(call) if call.name not in PRODUCTS else exponents_of(call)
    if partial:
        return BatchValue(PARTIAL, share=share, degree=degree)
    letters = {(found.inputs[i][call.values[i].dim], call.values[i].outer) for i in sharded}
    if len({letter for letter, _ in letters}) != 1 or len(letters) > 1:
        raise Refused("its operands have the samples in different dims")
    letter, outer = letters.pop()
    if any(letter in found.inputs[i] for i in range(len(call.values)) if i not in sharded):
        raise Refused("its operands have the samples in different dims")
    if letter in found.whole:
        raise Refused("the dim with the samples must be whole")
    if letter in found.output:
        return BatchValue(SHARDED, found.output.index(letter), outer, share, degree)
    if adds or dict(found.combine).get(letter, "sum") != "sum":
        raise Refused("it needs all samples at once")
    return BatchValue(PARTIAL, share=share, degree=None if degree is None else degree + 1)


_ADD_PRODUCTS = frozenset("addmm baddbmm addbmm addmv addr".split())


@lru_cache(maxsize=4096)
def _rule_of(name: str, shapes: tuple[Shape | None, ...], dims: tuple[int, ...]) -> Any:
    return ROWS[name].rule(shapes, dims)
