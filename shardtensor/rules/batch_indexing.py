"""Operations with indices, on a part of the batch: indices of other dims than the one with the samples stay valid."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from shardtensor.rules.batch import PARTIAL, REPLICATED, SHARDED, BatchCall, BatchValue, Operand, Refused, ScaleFirst
from shardtensor.rules.batch_exponents import rule

_LOOKED_UP, _WRITTEN = "the samples are looked up by number", "the samples are written by number"
_ELSEWHERE = "its operands have the samples in different dims"


@rule("embedding")
def _embedding(call: BatchCall) -> list[BatchValue]:
    weight, ids = call.values
    call.reduced(1)
    if weight.kind == SHARDED:
        raise Refused(_LOOKED_UP)
    if ids.kind == SHARDED:
        call.reduced(0)
        return [BatchValue(SHARDED, ids.dim, ids.outer, weight.share, weight.degree, is_uniform=ids.is_uniform)]
    return [attrs.evolve(weight, is_iota=False)]


@rule("index", "_unsafe_index")
def _index(call: BatchCall) -> list[BatchValue]:
    """``x[i, j, ...]``: operand 0 is x, the others are indices of its dims, None where a dim is kept."""
    x, places = call.values[0], call.operands[1:]
    for i in range(1, len(call.values)):
        call.reduced(i)
    if not call.of_kind(SHARDED):
        return [x]
    call.reduced(0)
    dim = call.batch_dim()
    if dim is None:
        raise Refused(_LOOKED_UP)
    outer = _indexed(call, places, _LOOKED_UP)
    return [BatchValue(SHARDED, dim, outer, x.share, x.degree)]


def _indexed(call: BatchCall, places: Sequence[Operand | None], why: str) -> int:
    """Return the blocks of the samples of an indexed tensor, which may have its samples only in their own places."""
    x = call.values[0]
    used = [i for i, number in enumerate(call.numbers) if 1 <= number <= len(places)]
    sharded = [i for i in used if call.values[i].kind == SHARDED]
    outer = call.aligned(max(len(call.tensors[i].shape) for i in used), *sharded)[1] if sharded else x.outer
    if x.kind != SHARDED:
        return outer
    own = places[x.dim] if x.dim < len(places) else None
    if own is None:
        if sharded:
            raise Refused(_ELSEWHERE)
    elif not own.value.is_iota or max(own.shape) != call.tensors[0].shape[x.dim] or outer != x.outer:
        raise Refused(why)
    return outer


@rule("index_put", "_unsafe_index_put")
def _index_put(call: BatchCall) -> list[BatchValue]:
    """Write or add values at indices: into zeros for the gradient of `index`. Operands: x, indices, values."""
    x, *places, values = call.operands
    assert x is not None and values is not None
    last = len(call.values) - 1
    for i in range(1, last):
        call.reduced(i)
    if not call.of_kind(SHARDED):
        return [_added(call, 0, last)]
    call.reduced(0)
    call.reduced(last)
    if x.value.kind != SHARDED:
        return [_scattered(call, last)]
    outer = _indexed(call, places, _WRITTEN)
    if values.value.kind == SHARDED and values.value.outer != outer and not values.value.is_uniform:
        raise Refused(_ELSEWHERE)
    if all(o is None or o.value.kind != SHARDED for o in places) and values.value.kind == SHARDED:
        ndim = len(values.shape) - values.value.dim  # x[:, i] = values: dims behind the indices, or before them
        if len(x.shape) - x.value.dim != ndim and x.value.dim != values.value.dim:
            raise Refused(_ELSEWHERE)
    return [_written(call, last)]


def _added(call: BatchCall, to: int, source: int) -> BatchValue:
    """Add partial or replicated values to zeros, or plain ones to others."""
    x, value = call.values[to], call.values[source]
    if x.is_zero:
        return value if value.kind == PARTIAL else BatchValue(share=value.share, degree=value.degree)
    call.plain()
    return BatchValue()


def _written(call: BatchCall, source: int) -> BatchValue:
    """Values written to a sharded tensor: both must have one factor."""
    x, value = call.values[0], call.values[source]
    if not x.is_zero and x.share != value.share:
        raise ScaleFirst(call.numbers[0 if x.share else source])
    return BatchValue(SHARDED, x.dim, x.outer, value.share, value.degree)


def _scattered(call: BatchCall, source: int) -> BatchValue:
    """Values of samples that are added to a tensor of all."""
    adds = call.options.get("accumulate", call.name.endswith("_add"))
    if not (call.values[0].is_zero and adds):
        raise Refused("each sample writes to the same tensor")
    value = call.values[source]
    return BatchValue(PARTIAL, share=value.share, degree=None if value.degree is None else value.degree + 1)


@rule("gather")
def _gather(call: BatchCall) -> list[BatchValue]:
    x, index = call.values
    dim = call.dim()
    call.reduced(1)
    if not call.of_kind(SHARDED):
        return [x]
    call.reduced(0)
    if index.kind != SHARDED or (x.kind == SHARDED and dim == x.dim):
        raise Refused(_LOOKED_UP)
    if x.kind == REPLICATED and index.dim != dim:
        raise Refused(_ELSEWHERE)
    own, outer, is_uniform = call.place() if x.kind == SHARDED else call.place(1)
    return [BatchValue(SHARDED, own, outer, x.share, x.degree, is_uniform=is_uniform)]


@rule("scatter", "scatter_add")
def _scatter(call: BatchCall) -> list[BatchValue]:
    """``scatter(x, dim, index, source)``; the source may be a number."""
    x, dim = call.values[0], call.dim()
    call.reduced(1)
    source = 2 if len(call.values) > 2 else 0
    if not call.of_kind(SHARDED):
        if call.name == "scatter_add":
            return [_added(call, 0, 2)]
        call.plain()
        return [BatchValue()]
    if call.options.get("reduce"):
        call.plain()
    for i in range(len(call.values)):
        call.reduced(i)
    kinds = {value.kind for value in call.values[1:]}
    if kinds != {SHARDED}:
        raise Refused(_WRITTEN)
    call.place(*range(1, len(call.values)))
    if x.kind != SHARDED:
        if call.values[1].dim != dim and len(call.tensors[1].shape) > 1:
            raise Refused(_ELSEWHERE)
        return [_scattered(call, 2)]
    if dim == x.dim:
        raise Refused(_WRITTEN)
    call.place()
    if source == 0:
        call.unscaled(0)
    return [_written(call, source)]


@rule("index_select")
def _index_select(call: BatchCall) -> list[BatchValue]:
    x, index = call.values
    dim = call.dim()
    call.reduced(1)
    if index.kind == SHARDED:
        call.reduced(0)
        if x.kind == SHARDED:
            raise Refused(_LOOKED_UP)
        return [BatchValue(SHARDED, dim, index.outer, x.share, x.degree)]
    if x.kind == SHARDED and dim == x.dim:
        raise Refused(_LOOKED_UP)
    return [attrs.evolve(x, is_iota=False, is_zero=False)]


@rule("index_add")
def _index_add(call: BatchCall) -> list[BatchValue]:
    """``index_add(x, dim, index, source)``: rows of the source are added to rows of x."""
    x, index, source = call.values
    dim = call.dim()
    call.reduced(1)
    if not call.of_kind(SHARDED):
        return [_added(call, 0, 2)]
    call.reduced(0)
    call.reduced(2)
    if index.kind == SHARDED:
        if x.kind == SHARDED or source.kind != SHARDED or source.dim != dim:
            raise Refused(_WRITTEN)
        if source.outer != index.outer and not (source.is_uniform or index.is_uniform):
            raise Refused(_ELSEWHERE)
        return [_scattered(call, 2)]
    if x.kind != SHARDED or source.kind != SHARDED or dim == x.dim:
        raise Refused(_WRITTEN)
    call.place(0, 2)
    return [_written(call, 2)]
