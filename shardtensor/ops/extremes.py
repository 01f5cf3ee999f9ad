"""Maxima and minima, their places, and norms.

The ranks' extremes are gathered (one value for each element of the result and rank), because backends' max and min
drop NaN. Gradients are torch's: amax and the full max share it among all ties, max over a dim gives it to the first.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.layout.layout import CutLayout
from shardtensor.ops.by_rule import joins_itself
from shardtensor.ops.engine import HALF
from shardtensor.ops.pointwise import spread
from shardtensor.ops.reducing import bound, gathered, local_extreme, lowest, places, reduces
from shardtensor.rules.dims import several_dims
from shardtensor.tensor.dispatch import HANDLERS, spellings
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


class Extreme(torch.autograd.Function):
    """The maximum (minimum) over `dims`, which stay with size 1; all ties in all ranks share its gradient."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, dims: tuple[int, ...], largest: bool, team: Group) -> torch.Tensor:
        found = gathered(local_extreme(local, dims, largest), team)
        out = found.amax(0) if largest else found.amin(0)
        ctx.save_for_backward(local, out)
        ctx.dims, ctx.team = dims, team
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        local, out = ctx.saved_tensors
        reached = (local == out) | (local.isnan() & out.isnan())
        ties = ctx.team.all_reduce(reached.sum(ctx.dims, keepdim=True, dtype=grad.dtype))
        return reached * (grad / ties), None, None, None


def _extreme(x: ShardedTensor, dim: Any, keepdim: bool, name: str) -> Any:
    r = bound(name, x, dim, keepdim)
    if r is None:
        return None
    if r.plan.count == 0:
        torch.amax(torch.empty(x.shape, device="meta"), several_dims(x.dim(), dim))  # torch's error
        return None
    if r.team is None:
        return r.give(getattr(torch, name)(r.local, r.dims, keepdim))
    out = Extreme.apply(r.local, r.dims, r.how == "max", r.team)
    return r.give(out if keepdim else out.squeeze(r.dims))


@reduces("amax")
def amax(input: ShardedTensor, dim: Any = None, keepdim: bool = False) -> Any:
    """The maximum over `dim`."""
    return _extreme(input, dim, keepdim, "amax")


@reduces("amin")
def amin(input: ShardedTensor, dim: Any = None, keepdim: bool = False) -> Any:
    """The minimum over `dim`."""
    return _extreme(input, dim, keepdim, "amin")


@joins_itself("first_of_all")
def _with_index(x: ShardedTensor, dim: int, keepdim: bool, largest: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The extreme values along one dim and their first global indices, as local tensors wrapped."""
    r = bound("max" if largest else "min", x, dim, keepdim)
    if r is None or not isinstance(x._layout, CutLayout):
        return None
    func = torch.max if largest else torch.min
    if r.team is None:
        values, indices = func(r.local, r.dims[0], keepdim) if x.dim() else func(r.local, 0)
        return r.give(values), r.give(indices)
    if r.plan.count == 0:
        func(torch.empty(x.shape, dtype=x.dtype), r.dims[0])  # torch's error; on meta it has none
    d = r.dims[0]
    here = places(x._layout, r.group.rank, d, r.local.device)
    if r.local.shape[d]:
        values, indices = func(r.local, d, keepdim=True)
        indices = here[indices]
    else:  # an empty part loses to every other; the sum of nothing keeps it in the graph
        values = r.local.sum(d, keepdim=True, dtype=r.local.dtype) + lowest(r.local.dtype, largest)
        values = values.to(r.local.dtype)
        indices = torch.full(values.shape, torch.iinfo(torch.int64).max, device=values.device)
    all_values, all_indices = gathered(values, r.team), gathered(indices, r.team)
    with torch.no_grad():
        best = all_values.amax(0) if largest else all_values.amin(0)
        is_best = (all_values == best) | (all_values.isnan() & best.isnan())
        pick = torch.where(is_best, all_indices, torch.iinfo(torch.int64).max).argmin(0, keepdim=True)
    values = all_values.gather(0, pick).squeeze(0)
    indices = all_indices.gather(0, pick).squeeze(0)
    if not keepdim:
        values, indices = values.squeeze(d), indices.squeeze(d)
    return r.give(values), r.give(indices)


def _max_or_min(largest: bool) -> Any:
    kind: Any = torch.return_types.max if largest else torch.return_types.min

    def compute(input: ShardedTensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return _extreme(input, None, False, "amax" if largest else "amin")
        found = _with_index(input, dim, keepdim, largest)
        return None if found is None else kind(found)

    return compute


def _either(func: Any) -> Any:
    """The handler of ``max`` and ``min``, which are elementwise when given a second tensor."""
    reduce = HANDLERS[func]

    def handler(*args: Any, **kwargs: Any) -> Any:
        if (len(args) > 1 and isinstance(args[1], torch.Tensor)) or "other" in kwargs:
            return spread(func, args, kwargs, "maximum" if "max" in func.__name__ else "minimum")
        return reduce(*args, **kwargs)

    return handler


reduces("max")(_max_or_min(True))
reduces("min")(_max_or_min(False))
for _func in [*spellings("max"), *spellings("min")]:
    HANDLERS[_func] = _either(_func)


def _argument(largest: bool) -> Any:
    func = torch.argmax if largest else torch.argmin

    def compute(input: ShardedTensor, dim: int | None = None, keepdim: bool = False) -> Any:
        layout = input._layout
        if dim is not None:
            found = _with_index(_mapped(input, torch.detach), dim, keepdim, largest)
            return None if found is None else found[1]
        r = bound(func.__name__, input, None, keepdim)
        if r is None or not isinstance(layout, CutLayout):
            return None
        if r.team is None or not r.plan.count:
            return r.give(func(r.local, keepdim=keepdim)) if r.team is None else func(torch.empty(0))
        local = r.local.detach()
        if local.numel():
            flat = func(local)
            value, place = local.reshape(-1)[flat], torch.unravel_index(flat, local.shape)
            index = torch.zeros_like(flat)
            for d, (size, at) in enumerate(zip(layout.shape, place, strict=True)):
                index = index * size + places(layout, r.group.rank, d, local.device)[at]
        else:
            value = local.new_full((), lowest(local.dtype, largest))
            index = torch.full((), torch.iinfo(torch.int64).max, device=local.device)
        values, indices = gathered(value, r.team), gathered(index, r.team)
        best = values.amax() if largest else values.amin()
        is_best = (values == best) | (values.isnan() & best.isnan())
        return r.give(torch.where(is_best, indices, torch.iinfo(torch.int64).max).amin())

    return compute


reduces("argmax")(_argument(True))
reduces("argmin")(_argument(False))


@reduces(also=(torch.linalg.vector_norm,))
def vector_norm(
    input: ShardedTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The p-norm over `dim`: the norm of the ranks' norms, which keeps torch's gradient at 0."""
    x = input if dtype is None else _mapped(input, lambda t: t.to(dtype))
    if math.isinf(ord):
        return _extreme(_mapped(x, torch.abs), dim, keepdim, "amax" if ord > 0 else "amin")
    if ord == 0:
        return torch.sum(_mapped(x, _is_counted), several_dims(x.dim(), dim), keepdim)
    r = bound("vector_norm", x, dim, keepdim)
    if r is None:
        return None
    if r.team is None:
        return r.give(torch.linalg.vector_norm(r.local, ord, r.dims, keepdim))
    wide = torch.float32 if r.local.dtype in HALF else None
    if ord < 0 and any(r.local.shape[d] == 0 for d in r.dims):  # which torch refuses; infinity adds nothing
        local = r.local.abs().sum(r.dims, keepdim, dtype=wide) + math.inf
    else:
        local = torch.linalg.vector_norm(r.local, ord, r.dims, keepdim, dtype=wide)
    joined = (
        collectives.all_reduce(local, r.team) if ord == 1 else torch.linalg.vector_norm(gathered(local, r.team), ord, 0)
    )
    return r.give(joined.to(r.local.dtype) if wide else joined)


@reduces("norm")
def norm(
    input: ShardedTensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Any:
    """``torch.norm``: the p-norm of all elements together, or over `dim`; "fro" is 2."""
    if p == "nuc":
        return None
    return vector_norm(input, 2 if p is None or p == "fro" else p, dim, keepdim, dtype=dtype)


@reduces(also=(torch.linalg.norm,))
def linalg_norm(
    input: ShardedTensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """``torch.linalg.norm`` where it is a vector norm or a Frobenius norm; other matrix norms gather."""
    dims = several_dims(input.dim(), dim)
    if ord is None or (ord == "fro" and len(dims) == 2):
        return vector_norm(input, 2, dim, keepdim, dtype=dtype)
    if isinstance(ord, str) or len(dims) != 1:
        return None
    return vector_norm(input, ord, dim, keepdim, dtype=dtype)


def _is_counted(t: torch.Tensor) -> torch.Tensor:
    """1 where an element is not 0, in the graph, as the norm of order 0 of each element."""
    return torch.linalg.vector_norm(t.unsqueeze(-1), 0, -1)


def _mapped(x: ShardedTensor, change: Any) -> ShardedTensor:
    return wrap(change(x._local), x._layout, None, x._group)
