"""Indexing by integers, slices, None and ``...``, by tensors, lists and masks, and functions built on it.

A slice is a view (no rank sends anything; shards become uneven). The index of a sharded dim is on one rank, which sends
its values to the others (one all-reduce): that result is a copy. As in torch, integers, slices and None apply first,
then tensors index the result; a mask becomes the indices where it is true.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from shardtensor.comm import collectives
from shardtensor.comm.redistribute import along
from shardtensor.layout.layout import MeshLayout
from shardtensor.ops.indices import index_of, index_put
from shardtensor.ops.local_call import LocalCall, cached_call
from shardtensor.ops.pointwise import written_through
from shardtensor.ops.views import copied, local_view, to_view, view
from shardtensor.rules.indexing import Item, indexing, normalize
from shardtensor.rules.rule import one_dim
from shardtensor.tensor.copied import refuse_lost_write
from shardtensor.tensor.dispatch import implements, implements_each, refuse_partial_write
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, copy_of, wrap

# -- by tensors --------------------------------------------------------------------------------------------------------


class Advanced(NamedTuple):
    """An index, split in two.

    Attributes:
        basic: integers, slices and None, with a whole slice in place of each tensor.
        tensors: integer tensors and masks, and None, for the dims of the result of `basic`; a mask has several dims.
    """

    basic: tuple[Any, ...]
    tensors: tuple[torch.Tensor | None, ...]

    @property
    def is_plain(self) -> bool:
        """Whether `basic` selects everything."""
        return all(isinstance(item, slice) and item == slice(None) for item in self.basic)


def advanced(index: Any, shape: tuple[int, ...], device: torch.device) -> Advanced | None:
    """Read an index that contains tensors; None if torch must judge it (floats, True and False, ragged lists)."""
    items = list(index) if isinstance(index, tuple) else [index]
    for i, item in enumerate(items):
        if isinstance(item, bool) or (isinstance(item, torch.Tensor) and item.dtype == torch.bool and not item.dim()):
            return None
        if isinstance(item, list | range) or type(item).__module__ == "numpy":
            try:
                items[i] = item = torch.as_tensor(list(item) if isinstance(item, range) else item)
            except (TypeError, ValueError, RuntimeError):
                return None
            if not item.numel():
                items[i] = item = item.to(torch.int64)
        if isinstance(item, torch.Tensor):
            if item.dtype == torch.uint8 or item.is_floating_point() or item.is_complex():
                return None
            if item.device != device:  # torch accepts indices on the CPU for a tensor elsewhere
                items[i] = item = item.to(device)
            if not item.dim():
                items[i] = int(item)
    if sum(item is Ellipsis for item in items) > 1:
        return None
    taking = sum(_taken(item) for item in items)
    if taking > len(shape):
        return None
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - taking)
    basic: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    dim = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            count = _taken(item)
            if item.dtype == torch.bool and tuple(item.shape) != shape[dim : dim + count]:
                return None
            basic += [slice(None)] * count
            tensors.append(item)
        else:
            basic.append(item)
            if item is None or isinstance(item, slice):
                tensors.append(None)
        dim += _taken(item)
    return Advanced(tuple(basic), tuple(tensors)) if any(t is not None for t in tensors) else None


def _taken(item: Any) -> int:
    """Return how many dims an item indexes."""
    if isinstance(item, torch.Tensor):
        return item.dim() if item.dtype == torch.bool else 1
    return int(item is not None and item is not Ellipsis)


# -- by place ----------------------------------------------------------------------------------------------------------


def _by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalCall | None:
    """Return the `LocalCall` for an index of integers and slices that sends nothing."""
    x, index = args
    if not isinstance(x, ShardedTensor) or x._layout.partial or not isinstance(x._layout, MeshLayout):
        return None
    items = normalize(index, x._layout.shape)
    if items is None or (x._layout.is_replicated and len(x._layout.ranks) != x._group.size):
        return None
    found = indexing(x._layout, items, x._group.rank)
    if found is None or found.to_sum:
        return None
    local_index = found.local
    return local_view(lambda local, _: local[local_index], x, found.layout)


def getitem(input: torch.Tensor, index: Any) -> Any:
    """Return ``input[index]``."""
    items = normalize(index, tuple(input.shape)) if isinstance(input, ShardedTensor) else None
    if items is None:
        found = advanced(index, tuple(input.shape), input.device)
        if found is None:
            return fall_back(torch.Tensor.__getitem__, (input, index), {})
        return index_of(input if found.is_plain else input[found.basic], found.tensors)
    result = index_basic(input, items)  # type: ignore[arg-type]
    if result is None:
        result = copied(torch.Tensor.__getitem__, (input, index), {})
    if isinstance(result, ShardedTensor) and result._copied is not None:
        again = (lambda: input[index], lambda changed: input.__setitem__(index, changed))
        result._copied = result._copied._replace(again=again)
    return result


implements(torch.Tensor.__getitem__)(cached_call(torch.Tensor.__getitem__, _by_place, getitem))


def index_basic(input: ShardedTensor, items: tuple[Item, ...]) -> torch.Tensor | None:
    """Index by normalized items; return None if it must gather."""
    x = to_view(input)
    layout, group = x._layout, x._group
    plan = indexing(layout, items, group.rank) if isinstance(layout, MeshLayout) else None
    if plan is None or (layout.is_replicated and len(layout.ranks) != group.size):
        return None
    if not plan.to_sum:
        return view(x, x._local[plan.local], plan.layout)

    local = x._local[plan.local].sum(plan.to_sum, dtype=x.dtype)  # the one element, or zeros, in the graph
    local = collectives.all_reduce(local, along(group, layout, plan.axes))
    found = local if plan.layout.is_replicated else wrap(local, plan.layout, None, group)
    return copy_of(found, x, "indexing a cut dim")


@implements(torch.Tensor.__setitem__)
def setitem(input: torch.Tensor, index: Any, value: Any) -> None:
    """Run ``input[index] = value``: every rank writes the elements that it holds."""
    if isinstance(input, ShardedTensor):
        if written_through(input, "Tensor.__setitem__", lambda row: row.__setitem__(index, value)):
            return
        refuse_partial_write(input, "Tensor.__setitem__")
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.shape == input.shape
    if is_mask and (not isinstance(value, torch.Tensor) or value.dim() == 0):
        input.masked_fill_(index, value)
        return
    items = normalize(index, tuple(input.shape)) if isinstance(input, ShardedTensor) else None
    if items is None and isinstance(input, ShardedTensor):
        found = advanced(index, tuple(input.shape), input.device)
        if found is not None and _assigned(input, found, value):
            return
    place = None
    if items is not None:
        assert isinstance(input, ShardedTensor)
        place = index_basic(input, tuple((i, i + 1, 1) if isinstance(i, int) else i for i in items))
    if items is None or place is None:
        fall_back(torch.Tensor.__setitem__, (input, index, value), {})
        return
    if not isinstance(value, torch.Tensor):
        place.fill_(value)
        return
    shape = [n for item, n in zip(items, place.shape, strict=True) if not isinstance(item, int)]
    while value.dim() > len(shape) and value.shape[0] == 1:  # torch allows leading ones
        value = value.squeeze(0)
    value = value.expand(shape)
    for d, item in enumerate(items):
        if isinstance(item, int):
            value = value.unsqueeze(d)
    place.copy_(value)


def _assigned(input: ShardedTensor, found: Advanced, value: Any) -> bool:
    """Write `value` where tensors index `input`; return False if it must be gathered."""
    dims = [i for i in found.basic if i is not None]
    layout = input._layout
    if not found.is_plain and (
        not isinstance(layout, MeshLayout)
        or any(not isinstance(i, slice) and layout.dims[d] is not None for d, i in enumerate(dims))
    ):
        return False  # a slice of boxes is no view; only one rank has a view of an index of a sharded dim
    place = input if found.is_plain else input[found.basic]
    if not isinstance(place, ShardedTensor):
        return False
    refuse_lost_write(place, "Tensor.__setitem__")
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=place.dtype, device=place.device)
    value = value.to(place.dtype)
    first, *others = found.tensors
    if first is not None and first.dtype == torch.bool and not value.dim() and all(t is None for t in others):
        place.masked_fill_(first.reshape(*first.shape, *(1,) * (place.dim() - first.dim())), value)
    else:
        place.copy_(index_put(place, found.tensors, value))
    return True


@implements(torch.narrow, torch.Tensor.narrow)
def narrow(input: torch.Tensor, dim: int, start: Any, length: int) -> torch.Tensor:
    """Return the elements ``start : start + length`` of a dim."""
    dim = one_dim(input.dim(), dim)
    torch.narrow(torch.empty(input.shape, device="meta"), dim, int(start), length)  # torch's errors
    start = int(start) % max(input.shape[dim], 1) if int(start) < 0 else int(start)
    return input[(slice(None),) * dim + (slice(start, start + length),)]


@implements(torch.select, torch.Tensor.select)
def select(input: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """Return one index of a dim, without that dim."""
    return input[(slice(None),) * one_dim(input.dim(), dim) + (index,)]


def _splitting(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of a function that splits a tensor along a dim, into views."""

    def handler(input: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        parts = func(torch.empty(input.shape, device="meta"), *args, **kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        starts = accumulate((part.shape[dim] for part in parts), initial=0)
        return tuple(narrow(input, dim, start, part.shape[dim]) for start, part in zip(starts, parts, strict=False))

    return handler


implements_each("split split_with_sizes chunk", _splitting)


@implements(torch.unbind, torch.Tensor.unbind)
def unbind(input: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return every index of a dim, each a view; copies for a sharded dim."""
    dim = one_dim(input.dim(), dim)
    layout = input._layout if isinstance(input, ShardedTensor) else None
    if not isinstance(layout, MeshLayout) or not layout.shape or layout.dims[dim] is not None:
        return copied(torch.unbind, (input, dim), {})
    return tuple(select(input, dim, i) for i in range(input.shape[dim]))
