"""Views, joins and reductions of a part of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from shardtensor.rules.batch import (
    PARTIAL,
    REPLICATED,
    SHARDED,
    BatchCall,
    BatchValue,
    ReduceFirst,
    Refused,
    sizes_text,
    viewed,
)
from shardtensor.rules.batch_exponents import exponents_of, rule
from shardtensor.rules.batch_kernels import pointwise, split_replicated


@rule("view")
def _view(call: BatchCall) -> list[BatchValue]:
    value, result = call.values[0], call.results[0]
    if not result.is_float and value.kind == PARTIAL and value.power == 1 and call.name == "_to_copy":
        raise ReduceFirst(call.numbers[0])  # rounds
    if call.name == "_to_copy" and not result.is_float:
        call.unscaled(0)
    dim = call.batch_dim()
    if value.kind == SHARDED:
        if dim is None:
            raise Refused(f"{sizes_text(result.shape)} has no dim with the samples")
        if call.name == "expand":
            return [value.at(value.dim + len(result.shape) - len(call.tensors[0].shape))]
        found = viewed(value, call.tensors[0].shape, result)
        if found is None:
            raise Refused("the view mixes the samples with another dim")
        return [found]
    if dim is None:
        return [value]
    call.reduced(0)  # expanded to the batch: the same for each sample
    return [attrs.evolve(value, kind=SHARDED, dim=dim, is_uniform=True, is_iota=False)]


@rule("copy")
def _copy(call: BatchCall) -> list[BatchValue]:
    """``copy(x, source)``: the values of the source in the shape of x."""
    x, source = call.tensors
    value = source.value
    if x.value.kind == SHARDED != value.kind:
        call.reduced(1)
        return [attrs.evolve(value, kind=SHARDED, dim=x.value.dim, outer=x.value.outer, is_uniform=True)]
    if x.shape != source.shape:
        call.reduced(1)
        call.unscaled(1)
        return [pointwise(call)]
    return [value]


def _permuted(call: BatchCall, order: Sequence[int]) -> list[BatchValue]:
    value = call.values[0]
    return [value.at(order.index(value.dim)) if value.kind == SHARDED else value]


@rule("permute")
def _permute(call: BatchCall) -> list[BatchValue]:
    ndim = len(call.tensors[0].shape)
    return _permuted(call, [d % ndim for d in call.options["dims"]])


@rule("transpose")
def _transpose(call: BatchCall) -> list[BatchValue]:
    order = list(range(len(call.tensors[0].shape)))
    if order:
        a, b = call.dim("dim0"), call.dim("dim1")
        order[a], order[b] = order[b], order[a]
    return _permuted(call, order)


@rule("t")
def _t(call: BatchCall) -> list[BatchValue]:
    return _permuted(call, list(range(len(call.tensors[0].shape)))[::-1])


@rule("slice")
def _slice(call: BatchCall) -> list[BatchValue]:
    value, size = call.values[0], call.tensors[0].shape[call.dim()]
    if value.kind != SHARDED or call.dim() != value.dim or call.results[0].shape[value.dim] == size:
        return [value]
    block = size // value.outer
    start, end = call.options["start"], call.options["end"]
    if call.options.get("step", 1) != 1 or start % block or end % block:
        raise Refused("it takes a part of the samples")
    return [attrs.evolve(value, outer=(end - start) // block, is_iota=False)]


@rule("select")
def _select(call: BatchCall) -> list[BatchValue]:
    return [_without(call, [call.dim()], "it takes one of the samples")]


@rule("unbind")
def _unbind(call: BatchCall) -> list[BatchValue]:
    return [_without(call, [call.dim()], "it takes the samples one by one")] * len(call.results)


def _without(call: BatchCall, dims: Sequence[int], why: str = "") -> BatchValue:
    """The value without these dims, if the result has fewer."""
    value = call.values[0]
    if value.kind != SHARDED:
        return value
    if value.dim in dims:
        raise Refused(why)
    is_kept = len(call.results[0].shape) == len(call.tensors[0].shape)
    return value.at(value.dim - (0 if is_kept else sum(d < value.dim for d in dims)))


@rule("split", "split_with_sizes")
def _split(call: BatchCall) -> list[BatchValue]:
    value = call.values[0]
    if value.kind == SHARDED and call.dim() == value.dim and len(call.results) > 1:
        raise Refused("it takes ranges of the samples")
    return [value] * len(call.results)


@rule("slice_backward", "select_backward")
def _padded(call: BatchCall) -> list[BatchValue]:
    """The gradient of a part: zeros around it."""
    value, shape = call.values[0], call.results[0].shape
    if value.kind != SHARDED:
        return [value]
    dim, added = call.dim(ndim=len(shape)), len(shape) - len(call.tensors[0].shape)
    own = value.dim + (added if dim <= value.dim else 0)
    if own == dim and shape != call.tensors[0].shape:
        raise Refused("it takes a part of the samples")
    return [value.at(own)]


@rule("repeat")
def _repeat(call: BatchCall) -> list[BatchValue]:
    value, result, repeats = call.values[0], call.results[0], call.options["repeats"]
    added = len(result.shape) - len(call.tensors[0].shape)
    if value.kind == SHARDED:
        dim = value.dim + added
        return [attrs.evolve(value.at(dim), outer=value.outer * repeats[dim])]
    own = call.batch_dim()
    if own is None:
        return [value]
    call.reduced(0)
    is_uniform = own < added or call.tensors[0].shape[own - added] == 1
    return [attrs.evolve(value, kind=SHARDED, dim=own, is_uniform=is_uniform)]


# -- joins ------------------------------------------------------------------------------------------------------------


@rule("cat", "stack")
def _join(call: BatchCall) -> list[BatchValue]:
    values, added = call.values, int(call.name == "stack")
    dim = call.dim(ndim=len(call.results[0].shape))
    partial, sharded = call.of_kind(PARTIAL), call.of_kind(SHARDED)
    if partial:
        powers = {v.power for v in values}
        if powers != {1} and (len(powers) > 1 or len(partial) < len(values)):
            raise ReduceFirst(call.numbers[next(i for i in partial if values[i].power != 1)])
        if powers == {1}:
            split_replicated(call, list(range(len(values))))
        share, degree = exponents_of(call)
        return [BatchValue(PARTIAL, share=share, degree=degree, power=values[partial[0]].power)]
    share, degree = exponents_of(call)
    if not sharded:
        return [BatchValue(share=share, degree=degree)]
    own, outer, is_uniform = call.place()
    if not added and own == dim:
        sizes = {operand.shape[dim] // operand.value.outer for operand in call.tensors}
        if len(sizes) > 1 or len(sharded) < len(values):
            raise Refused("it appends values that are not one for each sample to the samples")
        outer = sum(value.outer for value in values)
        return [BatchValue(SHARDED, own, outer, share, degree)]
    uniform = is_uniform and not any(v.kind == REPLICATED for v in values)
    return [BatchValue(SHARDED, own + (added if dim <= own else 0), outer, share, degree, is_uniform=uniform)]


@rule("where")
def _where(call: BatchCall) -> list[BatchValue]:
    return [pointwise(call)]


# -- reductions -------------------------------------------------------------------------------------------------------


@rule("sum")
def _sum(call: BatchCall) -> list[BatchValue]:
    return [_summed(call, 0, 1)]


@rule("mean")
def _mean(call: BatchCall) -> list[BatchValue]:
    return [_summed(call, 1, 0)]


@rule("count_nonzero")
def _count(call: BatchCall) -> list[BatchValue]:
    call.plain()
    return [_summed(call, 0, 1)]


def _summed(call: BatchCall, share: int, degree: int) -> BatchValue:
    value, dims = call.values[0], call.dims()
    if value.kind == SHARDED and value.dim in dims:
        total = None if value.degree is None else value.degree + degree
        return BatchValue(PARTIAL, share=value.share + share, degree=total)
    return _without(call, dims)


@rule("linalg_vector_norm")
def _norm(call: BatchCall) -> list[BatchValue]:
    value, dims = call.values[0], call.dims()
    order = float(call.options.get("ord", 2))
    if value.kind == PARTIAL and value.power == order != 1 and not call.results[0].shape:
        return [value]
    call.plain()
    if value.kind == SHARDED and value.dim in dims:
        return [BatchValue(PARTIAL, power=order if order else 1.0)]
    return [attrs.evolve(_without(call, dims), degree=0)]


_EXTREMES = {"amax": "inf", "any": "inf", "max": "inf", "amin": "-inf", "all": "-inf", "min": "-inf"}


@rule(*_EXTREMES)
def _extreme(call: BatchCall) -> list[BatchValue]:
    if len(call.tensors) > 1:  # the larger of two tensors
        return [pointwise(call)]
    call.plain()
    value, dims = call.values[0], call.dims()
    if value.kind == SHARDED and value.dim in dims:
        if len(call.results) > 1:
            raise Refused("it compares the samples with one another")
        return [BatchValue(PARTIAL, power=float(_EXTREMES[call.name]))]
    return [attrs.evolve(_without(call, dims), degree=0)] * len(call.results)
