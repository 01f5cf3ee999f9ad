"""Writing by indices: scatter and its kin, index_add, index_copy, index_fill, index_reduce, index_put.

``b into, b !at, b !at -> b into``: every rank sees all that is written and writes what falls on its part; the rest goes
into one slice more, which is thrown away. Nothing is reduced, and each kind of write is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.engine import finish, prepare, write_out
from shardtensor.ops.ids import check_ids, held
from shardtensor.ops.lookup import in_range, out_of_bounds
from shardtensor.ops.masks import put
from shardtensor.rules.advanced import first_of, writing
from shardtensor.rules.dims import one_dim
from shardtensor.rules.table import rule_of
from shardtensor.tensor.dispatch import HANDLERS, implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled

Write = Callable[..., torch.Tensor]


def written(
    name: str,
    x: torch.Tensor,
    d: int,
    index: torch.Tensor,
    values: Sequence[torch.Tensor],
    write: Write,
) -> torch.Tensor | None:
    """`x` after ``write(x, index, *values)`` along dim `d`; None where it must be gathered."""
    if not any(isinstance(t, ShardedTensor) for t in (x, index, *values)):
        return write(x, index, *values)
    rule = rule_of(name, tuple(tuple(t.shape) for t in (x, index, *values)) + (None,) * (1 - len(values)), (d,))
    ready = None if rule is None else prepare(name, rule, (x, index, *values))
    if ready is None:
        return None
    (local, at, *brought), recipe, group = ready
    layout = recipe.needs[0].layout
    if layout.dims[d] is None:
        return finish(write(local, at, *brought), recipe.output, group)
    here, mine = held(at, layout, group.rank, d)
    roomy = with_spare(local, d)
    count = local.shape[d]
    out = write(roomy, here.masked_fill(~mine, count), *brought).narrow(d, 0, count)
    return finish(out, recipe.output, group)


def with_spare(local: torch.Tensor, d: int) -> torch.Tensor:
    """A copy with one slice more along a dim, for what other ranks write."""
    shape = [1 if k == d else n for k, n in enumerate(local.shape)]
    return torch.cat([local, local.new_ones(shape)], d)


# -- scatter -----------------------------------------------------------------------------------------------------------


def _scatters(name: str) -> None:
    func = getattr(torch, name)

    def handler(input: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("out") is not None:
            return write_out(lambda f, a, k: handler(*a, **k), func, (input, dim, index, *args), kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        src, rest = (kwargs.pop("src"), args) if "src" in kwargs else (args[0], args[1:]) if args else (None, ())
        whole_call = (input, dim, index, *(() if src is None else (src,)), *rest)
        if index.dim() != input.dim() or not input.dim():
            return fall_back(func, whole_call, kwargs)
        d = one_dim(input.dim(), dim)
        meta = [torch.empty((), dtype=t.dtype, device="meta").expand(t.shape) if isinstance(t, torch.Tensor) else t
                for t in whole_call]  # fmt: skip
        func(*meta, **kwargs)  # torch's errors
        check_ids(index, 0, input.shape[d], out_of_bounds(d, input.shape[d]))
        values = [src] if isinstance(src, torch.Tensor) and src.dim() else []
        for k in range(input.dim()):
            values = [v.narrow(k, 0, index.shape[k]) if v.shape[k] > index.shape[k] else v for v in values]
        scalar = () if values or src is None else (src,)

        def write(x: torch.Tensor, at: torch.Tensor, *brought: torch.Tensor) -> torch.Tensor:
            return func(x, d, at, *brought, *scalar, *rest, **kwargs)

        small = [k for k in range(input.dim()) if k != d and index.shape[k] != input.shape[k]]
        target = input
        for k in small:
            target = target.narrow(k, 0, index.shape[k])
        out = written(name, target, d, index, values, write)
        if out is None:
            return fall_back(func, whole_call, kwargs)
        if not small:
            return out
        result = (settled(input) if isinstance(input, ShardedTensor) else input).clone()
        place = result
        for k in small:
            place = place.narrow(k, 0, index.shape[k])
        place.copy_(out)
        return result

    for spelled in (func, getattr(torch.Tensor, name)):
        HANDLERS[spelled] = handler


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    _scatters(_name)


# -- a vector of indices -----------------------------------------------------------------------------------------------


def _indexes(name: str) -> None:
    func = getattr(torch, name)

    def handler(input: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("out") is not None:
            return write_out(lambda f, a, k: handler(*a, **k), func, (input, dim, index, *args), kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        named = next((key for key in ("source", "value") if key in kwargs), None)
        src, rest = (kwargs.pop(named), args) if named else (args[0], args[1:])
        if index.dim() != 1 or not input.dim():
            return fall_back(func, (input, dim, index, src, *rest), kwargs)
        d = one_dim(input.dim(), dim)
        n = input.shape[d]
        low = -n if name == "index_fill" else 0
        check_ids(index, low, n, lambda _: IndexError("index out of range in self"))
        if low and n:
            index = torch.where(index < 0, index + n, index)
        if isinstance(src, torch.Tensor) and name != "index_fill":
            wanted = tuple(index.shape[0] if k == d else m for k, m in enumerate(input.shape))
            if tuple(src.shape) != wanted:
                return fall_back(func, (input, dim, index, src, *rest), kwargs)
        values = [src] if isinstance(src, torch.Tensor) else []

        def write(x: torch.Tensor, at: torch.Tensor, *brought: torch.Tensor) -> torch.Tensor:
            return func(x, d, at, *(brought or (src,)), *rest, **kwargs)

        out = written(name, input, d, index, values, write)
        return fall_back(func, (input, dim, index, src, *rest), kwargs) if out is None else out

    for spelled in (func, getattr(torch.Tensor, name)):
        HANDLERS[spelled] = handler


for _name in ("index_add", "index_copy", "index_fill", "index_reduce"):
    _indexes(_name)


# -- several dims ------------------------------------------------------------------------------------------------------


@implements(torch.index_put, torch.Tensor.index_put)
def index_put(
    input: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """`input` with `values` where `indices` say: ``x y r, !i, !i, i r -> x y r``; a mask of the first dims, too."""
    given = list(indices)
    if any(t is not None and (t.dtype == torch.uint8 or (t.dtype == torch.bool and len(given) > 1)) for t in given):
        return fall_back(torch.index_put, (input, tuple(indices), values, accumulate), {})
    if given[0] is not None and given[0].dtype == torch.bool:
        out = None if accumulate else put(input, given[0], values)
    else:
        out = put_at(input, given, values, accumulate)
    return fall_back(torch.index_put, (input, tuple(indices), values, accumulate), {}) if out is None else out


def put_at(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor | None:
    """`x` with `values` at integer indices, None for whole dims; None where it must be gathered."""
    indices = in_range(x, indices)
    tensors = [index for index in indices if index is not None]
    at = tuple(k for k, index in enumerate(indices) if index is not None)
    broad = tuple(torch.broadcast_shapes(*(index.shape for index in tensors)))
    rest = [n for k, n in enumerate(x.shape) if k not in at]
    shape = (*rest[: first_of(at)], *broad, *rest[first_of(at) :])
    while values.dim() > len(shape) and values.shape[0] == 1:
        values = values.squeeze(0)
    if torch.broadcast_shapes(values.shape, shape) != shape:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {list(shape)}"
        )
    if not any(isinstance(t, ShardedTensor) for t in (x, *tensors, values)):
        return torch.ops.aten.index_put(x, indices, values, accumulate)
    rule = writing(tuple(x.shape), at, tuple(tuple(t.shape) for t in tensors), broad, tuple(values.shape))
    ready = prepare("index_put", rule, (x, *tensors, values))
    if ready is None:
        return None
    (local, *ats, brought), recipe, group = ready
    layout = recipe.needs[0].layout
    where = iter(ats)
    places = [None if index is None else next(where) for index in indices]
    return finish(_put(local, places, brought, accumulate, layout, group.rank), recipe.output, group)


def _put(
    local: torch.Tensor, places: list[Any], values: torch.Tensor, accumulate: bool, layout: CutLayout, rank: int
) -> torch.Tensor:
    cut = [k for k, place in enumerate(places) if place is not None and layout.dims[k] is not None]
    if not cut:
        return torch.ops.aten.index_put(local, places, values, accumulate)
    mine = torch.ones((), dtype=torch.bool, device=local.device)
    for k in cut:
        places[k], here = held(places[k], layout, rank, k)
        mine = mine & here
    d, count = cut[0], local.shape[cut[0]]
    if not all(local.shape[k] for k in cut[1:]):
        return local + values.sum().to(local.dtype) * 0 if values.requires_grad else local.clone()
    places[d] = torch.where(mine, places[d], count)
    return torch.ops.aten.index_put(with_spare(local, d), places, values, accumulate).narrow(d, 0, count)
