"""Reading by indices: gather, index_select, ``x[i, :, j]``.

``b from, b at -> b at``: where the dim that is read is cut, each rank reads what it holds and the results are summed,
or, where the result is larger than the source, the source is laid out anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardtensor.layout.layout import CutLayout
from shardtensor.ops.by_rule import whole_in
from shardtensor.ops.engine import finish, prepare, write_out
from shardtensor.ops.ids import check_ids, held
from shardtensor.rules.advanced import first_of, reading
from shardtensor.rules.dims import one_dim
from shardtensor.rules.table import rule_of
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor

Indices = Sequence[torch.Tensor | None]


def out_of_bounds(dim: int, size: int) -> Any:
    """The error of an index that is too large or too small, as torch says it."""
    return lambda index: IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")


# -- one dim ---------------------------------------------------------------------------------------------------------


@implements(torch.gather, torch.Tensor.gather)
def gather(
    input: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False, out: Any = None
) -> torch.Tensor:
    """``input`` at `index` along a dim: global shapes ``b from, b at -> b at``; `index` may be smaller elsewhere."""
    if out is not None:
        return write_out(lambda f, a, k: gather(*a), torch.gather, (input, dim, index), {"out": out})
    if index.dim() != input.dim() or not input.dim() or sparse_grad:
        return fall_back(torch.gather, (input, dim, index), {"sparse_grad": sparse_grad})
    d = one_dim(input.dim(), dim)
    probe = [torch.empty((), dtype=t.dtype, device="meta").expand(t.shape) for t in (input, index)]
    torch.gather(probe[0], d, probe[1])  # torch's errors
    check_ids(index, 0, input.shape[d], out_of_bounds(d, input.shape[d]))
    for k in range(input.dim()):
        if k != d and index.shape[k] < input.shape[k]:
            input = input.narrow(k, 0, index.shape[k])
    return _along(input, d, index)


def _along(x: torch.Tensor, d: int, index: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, ShardedTensor) and not isinstance(index, ShardedTensor):
        return torch.gather(x, d, index)
    rule = rule_of("gather", (tuple(x.shape), tuple(index.shape)), (d,))
    assert rule is not None
    if index.numel() > x.numel():  # then to sum the result is dearer than to move the source
        rule = whole_in(rule, "d")
    ready = prepare("gather", rule, (x, index))
    if ready is None:
        return fall_back(torch.gather, (x, d, index), {})
    (local, at), recipe, group = ready
    layout = recipe.needs[0].layout
    if layout.dims[d] is None:
        return finish(local.gather(d, at), recipe.output, group)
    here, mine = held(at, layout, group.rank, d)
    found = local.gather(d, here).masked_fill(~mine, 0) if local.shape[d] else _nothing(local, at.shape)
    return finish(found, recipe.output, group)


def _nothing(local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of a rank that holds nothing of what is read; in the graph, as backward is collective."""
    zeros = local.new_zeros(tuple(shape))
    return zeros + local.sum() * 0 if local.requires_grad else zeros


@implements(torch.index_select, torch.Tensor.index_select)
def index_select(input: torch.Tensor, dim: int, index: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    """The slices of a dim that a vector of indices names: ``b from c, at -> b at c``."""
    if out is not None:
        return write_out(lambda f, a, k: index_select(*a), torch.index_select, (input, dim, index), {"out": out})
    if index.dim() > 1 or not input.dim():
        return fall_back(torch.index_select, (input, dim, index), {})
    d = one_dim(input.dim(), dim)
    check_ids(index, 0, input.shape[d], lambda _: IndexError("index out of range in self"))
    return index_of(input, [*(None,) * d, index.reshape(-1)])


# -- several dims ------------------------------------------------------------------------------------------------------


def in_range(x: torch.Tensor, indices: Indices) -> list[torch.Tensor | None]:
    """The indices counted from the front.

    Raises:
        IndexError: one is out of range, on every rank.
    """
    found: list[torch.Tensor | None] = []
    for k, index in enumerate(indices):
        if index is not None:
            n = x.shape[k]
            check_ids(index, -n, n, out_of_bounds(k, n))
            index = torch.where(index < 0, index + n, index) if n else index
        found.append(index)
    return found


def index_of(x: torch.Tensor, indices: Indices) -> torch.Tensor:
    """``x[indices]`` for integer tensors, and None for dims that stay whole, one entry a dim (fewer: the first dims).

    Global shapes ``x y r, i, j i -> j i r``. Negative indices count from the end.
    """
    indices = in_range(x, indices)
    tensors = [index for index in indices if index is not None]
    if not any(isinstance(t, ShardedTensor) for t in (x, *tensors)):
        return x[tuple(slice(None) if index is None else index for index in indices)]
    at = tuple(k for k, index in enumerate(indices) if index is not None)
    broad = tuple(torch.broadcast_shapes(*(index.shape for index in tensors)))
    rule = reading(tuple(x.shape), at, tuple(tuple(t.shape) for t in tensors), broad)
    if math.prod(broad) * math.prod(n for k, n in enumerate(x.shape) if k not in at) > x.numel():
        rule = attrs.evolve(rule, whole=frozenset(f"x{k}" for k in at))
    ready = prepare("index", rule, (x, *tensors))
    if ready is None:
        return fall_back(torch.Tensor.__getitem__, (x, tuple(slice(None) if i is None else i for i in indices)), {})
    (local, *ats), recipe, group = ready
    layout = recipe.needs[0].layout
    where = iter(ats)
    places: list[Any] = [slice(None) if index is None else next(where) for index in indices]
    found = _read(local, places, layout, group.rank)
    return finish(found, recipe.output, group)


def _read(local: torch.Tensor, places: list[Any], layout: CutLayout, rank: int) -> torch.Tensor:
    """``local[places]``, zeros where an index is of another rank."""
    at = tuple(k for k, place in enumerate(places) if not isinstance(place, slice))
    cut = [k for k in at if layout.dims[k] is not None]
    if not cut:
        return local[tuple(places)]
    broad = torch.broadcast_shapes(*(places[k].shape for k in at))
    mine = torch.ones((), dtype=torch.bool, device=local.device)
    for k in cut:
        places[k], here = held(places[k], layout, rank, k)
        mine = mine & here
    rest = [n for k, n in enumerate(local.shape) if k not in at]
    first = first_of(at)
    if not all(local.shape[k] for k in at):
        return _nothing(local, (*rest[:first], *broad, *rest[first:]))
    mask = mine.expand(broad).reshape((*broad, *(1,) * (len(rest) - first)))
    return local[tuple(places)].masked_fill(~mask, 0)
