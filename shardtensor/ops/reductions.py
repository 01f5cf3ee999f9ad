"""Sums and what is made of them: ``d0 d1 -> d1`` where d0 is cut leaves addends, which are summed at once.

Half-precision addends are summed in float32 and rounded once, as the dense sum is.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from shardtensor.comm import collectives
from shardtensor.ops.by_rule import joins_itself
from shardtensor.ops.empty_parts import at_least_one
from shardtensor.ops.engine import HALF
from shardtensor.ops.reducing import Bound, bound, local_extreme, reduces
from shardtensor.tensor.sharded_tensor import ShardedTensor


@reduces("sum")
def sum_(input: ShardedTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Sum over `dim`; one all-reduce of the result where it is cut."""
    r = bound("sum", input, dim, keepdim)
    return None if r is None else r.give(_total(r, dtype, keepdim))


def _total(r: Bound, dtype: torch.dtype | None, keepdim: bool) -> torch.Tensor:
    want = dtype or r.local.dtype
    if r.team is None or want not in HALF:
        return r.joined(torch.sum(r.local, r.dims, keepdim, dtype=dtype))
    return r.joined(torch.sum(r.local, r.dims, keepdim, dtype=torch.float32)).to(want)


@reduces("nansum")
def nansum(input: ShardedTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The sum of the elements that are numbers."""
    r = bound("nansum", input, dim, keepdim)
    return None if r is None else r.give(_total(r._replace(local=r.local.nan_to_num(0.0, inf, -inf)), dtype, keepdim))


@reduces("mean")
def mean(input: ShardedTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """The mean over `dim`, of all elements and not of the ranks' means."""
    r = bound("mean", input, dim, keepdim)
    if r is None:
        return None
    want = dtype or r.local.dtype
    if r.team is None or not (want.is_floating_point or want.is_complex):  # the second is torch's error
        return r.give(torch.mean(r.local, r.dims, keepdim, dtype=dtype))
    local = torch.sum(r.local, r.dims, keepdim, dtype=torch.float32 if want in HALF else dtype)
    return r.give(r.joined(local).to(want))


@joins_itself("two_passes")
def _moments(
    x: ShardedTensor, dim: Any, unbiased: Any, keepdim: bool, correction: Any
) -> tuple[torch.Tensor, torch.Tensor, Bound] | None:
    """The variance and the mean, local tensors of the result's layout."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    r = bound("var", x, dim, keepdim)
    if r is None:
        return None
    if r.team is None:
        local = r.local  # of an empty one torch would warn
        local = at_least_one(local, [d for d in range(local.dim()) if d not in r.dims])
        held = tuple(slice(n) for n in r.plan.layout.local_shape(r.group.rank))
        spread, average = torch.var_mean(local, r.dims, correction=correction, keepdim=keepdim)
        return (spread, average, r) if local is r.local else (spread[held], average[held], r)
    if not (r.local.is_floating_point() or r.local.is_complex()):
        torch.var_mean(torch.empty(x.shape, dtype=x.dtype, device="meta"))  # torch's error
    local = r.local.float() if r.local.dtype in HALF else r.local
    n = r.plan.count
    average = collectives.all_reduce(local.sum(r.dims, keepdim=True), r.team) / n
    away = local - collectives.sum_gradient(average, r.team)
    squares = away.abs().square() if away.is_complex() else away.square()
    variance = collectives.all_reduce(squares.sum(r.dims, keepdim=True), r.team) / max(n - correction, 0)
    if not keepdim:
        variance, average = variance.squeeze(r.dims), average.squeeze(r.dims)
    dtype = r.local.dtype.to_real() if r.local.is_complex() else r.local.dtype
    return variance.to(dtype), average.to(r.local.dtype), r


@reduces("var")
def var(
    input: ShardedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """The variance, in two passes: two all-reduces of the result where `dim` is cut."""
    found = _moments(input, dim, unbiased, keepdim, correction)
    return None if found is None else found[2].give(found[0])


@reduces("std")
def std(
    input: ShardedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """The standard deviation; its gradient is 0 where it is 0, as torch's."""
    found = _moments(input, dim, unbiased, keepdim, correction)
    return None if found is None else found[2].give(_root(found[0]))


@reduces("var_mean")
def var_mean(
    input: ShardedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """The variance and the mean."""
    found = _moments(input, dim, unbiased, keepdim, correction)
    return None if found is None else (found[2].give(found[0]), found[2].give(found[1]))


@reduces("std_mean")
def std_mean(
    input: ShardedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """The standard deviation and the mean."""
    found = _moments(input, dim, unbiased, keepdim, correction)
    return None if found is None else (found[2].give(_root(found[0])), found[2].give(found[1]))


def _root(variance: torch.Tensor) -> torch.Tensor:
    zero = variance == 0
    return variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


@reduces("prod")
def prod(
    input: ShardedTensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The product: the ranks' products are gathered and multiplied, so that gradients at zeros come out right."""
    r = bound("prod", input, dim, keepdim)
    if r is None or (dim is not None and not isinstance(dim, int)):
        return None
    local = torch.prod(r.local, dtype=dtype) if dim is None else torch.prod(r.local, r.dims[0], keepdim, dtype=dtype)
    return r.give(r.joined(local))


@reduces("logsumexp")
def logsumexp(input: ShardedTensor, dim: Any, keepdim: bool = False) -> Any:
    """The logarithm of the sum of exponentials: the maximum and the sum are joined, as softmax does."""
    r = bound("logsumexp", input, dim, keepdim)
    if r is None:
        return None
    if r.team is None:
        return r.give(torch.logsumexp(r.local, r.dims, keepdim))
    if r.local.is_complex():
        return None
    local = r.local if r.local.is_floating_point() else r.local.to(torch.get_default_dtype())
    dtype, local = local.dtype, local.float() if local.dtype in HALF else local
    with torch.no_grad():
        top = r.team.all_reduce(local_extreme(local, r.dims, True), "max")
        top = top.masked_fill(~top.isfinite(), 0)
    total = collectives.all_reduce((local - top).exp().sum(r.dims, keepdim=True), r.team).log() + top
    return r.give((total if keepdim else total.squeeze(r.dims)).to(dtype))


@reduces("count_nonzero")
def count_nonzero(input: ShardedTensor, dim: Any = None) -> Any:
    """The number of elements that are not zero, int64."""
    r = bound("count_nonzero", input, dim)
    return None if r is None else r.give(r.joined(torch.sum(r.local != 0, r.dims)))


def _truth(name: str) -> None:
    func = getattr(torch, name)

    @reduces(name)
    def truth(input: ShardedTensor, dim: Any = None, keepdim: bool = False) -> Any:
        r = bound(name, input, dim, keepdim)
        if r is None:
            return None
        is_full = len(r.dims) == r.local.dim()
        return r.give(r.joined(func(r.local) if is_full else func(r.local, r.dims, keepdim)))


_truth("any")
_truth("all")
