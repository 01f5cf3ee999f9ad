"""Index tensors: range checks, the indices that a rank holds; gather, scatter, ``x[i, :, j]``, index_put, nonzero.

Reads, ``b from, b at -> b at``: if the indexed dim is sharded, each rank reads the elements that it holds and the
results are summed; if the result is larger than the source, the source is redistributed. Writes,
``b into, b !at, b !at -> b into``: every rank has all values and writes those in its part; it writes the others to an
extra slice, which is dropped. Nothing is reduced, and torch's own function does each kind of write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.layout.layout import MeshLayout
from shardtensor.ops.by_rule import LetterCut, by_rule, combines
from shardtensor.ops.engine import chosen_sharding, in_graph, write_out
from shardtensor.ops.local_call import run_as
from shardtensor.rules.indexing import first_of, reading, writing
from shardtensor.rules.rule import one_dim
from shardtensor.tensor.dispatch import implements, implements_each
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.sharded_tensor import ShardedTensor, reduced


def check_ids(
    ids: torch.Tensor, low: int, high: int, fault: Callable[[int], Exception], ignore: int | None = None
) -> None:
    """Raise ``fault(id)`` on every rank when an id other than `ignore` is not in ``[low, high)``, before data moves.

    Each rank checks replicated ids by itself. For sharded ids the ranks exchange the smallest and the largest, in one
    reduction of two numbers: a rank that raised alone would leave the others waiting. On CUDA the host does not wait:
    the check is an assert on the device, like that of torch's kernels.
    """
    ids = reduced(ids) if isinstance(ids, ShardedTensor) else ids  # partial sums are no ids
    local = ids._local if isinstance(ids, ShardedTensor) else ids
    outside = out_of_range(local, low, high, ignore)
    if isinstance(ids, ShardedTensor) and local.is_cpu and not ids._layout.is_whole_on_all(ids._group.size):
        outside = widest(outside, ids._group)
    if outside:
        raise fault(outside[0])


def out_of_range(
    local: torch.Tensor, low: int, high: int, ignore: int | None = None, *, waits: bool = False
) -> list[int]:
    """Return the smallest and the largest of this rank's ids, as far as they are out of range.

    On CUDA return none and assert on the device, unless the host `waits` for the result.
    """
    local = local.detach()
    if local.is_meta or not local.numel():
        return []
    if not local.is_cpu and not waits:
        is_id = (local >= low) & (local < high)
        torch._assert_async((is_id if ignore is None else is_id | (local == ignore)).all())
        return []
    least, most = map(int, local.aminmax())
    if ignore is not None and not low <= least <= most < high:
        local = local[local != ignore]
        least, most = map(int, local.aminmax()) if local.numel() else (low, low)
    return [end for end in (least, most) if not low <= end < high]


def widest(outside: list[int], group: Group) -> list[int]:
    """Return the smallest and the largest of all ranks' `outside` (collective)."""
    nothing = torch.iinfo(torch.int64)
    ends = [-outside[0], outside[-1]] if outside else [nothing.min, nothing.min]
    ends = group.all_reduce(torch.tensor(ends, dtype=torch.int64), "max").tolist()
    return [] if ends[1] == nothing.min else [-ends[0], ends[1]]


def held(ids: torch.Tensor, layout: MeshLayout, rank: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of ids along `dim` in the local tensor of `rank`, 0 for others, and a mask of those there."""
    count = layout.local_shape(rank)[dim]
    if layout.is_blocked(dim):
        where = torch.full((layout.shape[dim],), -1, device=ids.device)
        where[places(layout, rank, dim, ids.device)] = torch.arange(count, device=ids.device)
        here = where[ids]
    else:
        here = ids - layout.start(rank, dim)
    is_own = (here >= 0) & (here < count)
    return here.masked_fill(~is_own, 0), is_own


def places(layout: MeshLayout, rank: int, dim: int, device: torch.device) -> torch.Tensor:
    """Return the global indices along `dim` of the elements that `rank` holds, in local order."""
    boxes = layout.boxes(rank)
    if not boxes:
        return torch.arange(0, device=device)
    spans = dict.fromkeys((box.offsets[dim], box.sizes[dim]) for box in boxes)
    pieces = [torch.arange(start, start + size, device=device) for start, size in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


Indices = Sequence[torch.Tensor | None]


def _out_of_bounds(dim: int, size: int) -> Callable[[int], Exception]:
    """Return torch's error for an index that is too large or too small."""
    return lambda index: IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")


# -- one dim -----------------------------------------------------------------------------------------------------------


@combines("read", blocks=True)
def read_own(cut: LetterCut, local: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Read as ``gather`` and ``index_select`` along the sharded dim: zeros for what other ranks hold, then the sum."""
    (source, index), d = cut.layouts, cut.dims[0]
    is_gather = cut.name == "gather"
    if math.prod(index.shape) > (math.prod(source.shape) if is_gather else source.shape[d]):
        return NotImplemented  # summing the result costs more than redistributing the source
    here, is_own = held(at, source, cut.group.rank, d)
    if local.shape[d]:
        is_own = is_own if is_gather else is_own.view(-1, *(1,) * (local.dim() - 1 - d))
        found = cut.compute(local, here).masked_fill(~is_own, 0)
    else:
        shape = at.shape if is_gather else (*local.shape[:d], len(at), *local.shape[d + 1 :])
        found = _nothing(local, shape)
    return collectives.all_reduce(found, cut.subgroup)


def _nothing(local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return zeros, for a rank that holds none of the elements that are read."""
    return in_graph(local.new_zeros(tuple(shape)), (local,))


@combines("write", blocks=True)
def write_own(cut: LetterCut, local: torch.Tensor, at: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
    """Write along the sharded dim the elements that this rank holds."""
    d = cut.dims[0]
    count = local.shape[d]
    here, is_own = held(at, cut.layouts[0], cut.group.rank, d)
    return cut.compute(_with_spare(local, d), here.masked_fill(~is_own, count), *values).narrow(d, 0, count)


def _with_spare(local: torch.Tensor, d: int) -> torch.Tensor:
    """Return a copy with one more slice along a dim, for the elements that other ranks hold."""
    shape = [1 if k == d else n for k, n in enumerate(local.shape)]
    return torch.cat([local, local.new_ones(shape)], d)


def _checked(func: Any) -> Callable[..., torch.Tensor]:
    """Return the handler of an operation along one dim; it first checks, on all ranks, that indices are in range."""
    name = func.__name__
    sharded = by_rule(func, name)

    def follow(*args: Any, **kwargs: Any) -> torch.Tensor:
        # A replicated operand that was narrowed, or whose negative indices were replaced, may be a plain tensor now.
        is_sharded = any(isinstance(x, ShardedTensor) for x in (*args, *kwargs.values()))
        return (sharded if is_sharded else func)(*args, **kwargs)

    def handler(input: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.dim():
            d, n = one_dim(input.dim(), dim), input.shape[dim]
            low = -n if name == "index_fill" else 0
            check_ids(index, low, n, _out_of_bounds(d, n))
            index = torch.where(index < 0, index + n, index) if low else index
            if not name.startswith("index") and index.dim() == input.dim():  # it may be smaller than the other operands
                others = [k for k in range(input.dim()) if k != d]
                args = tuple(map(lambda x: _narrowed(x, index), args))
                kwargs = {key: _narrowed(x, index) for key, x in kwargs.items()}
                place = _narrowed(input, index, others)
                if place is not input and name != "gather":
                    result = (reduced(input) if isinstance(input, ShardedTensor) else input).clone()
                    _narrowed(result, index, others).copy_(follow(place, dim, index, *args, **kwargs))
                    return result
                input = place
        return follow(input, dim, index, *args, **kwargs)

    return handler


def _narrowed(x: Any, index: torch.Tensor, dims: Sequence[int] | None = None) -> Any:
    """Return the first elements of a tensor, as many as the index has along `dims`, or all dims; others unchanged."""
    if isinstance(x, torch.Tensor) and x.dim() == index.dim():
        for k in range(x.dim()) if dims is None else dims:
            x = x.narrow(k, 0, index.shape[k]) if index.shape[k] < x.shape[k] else x
    return x


implements_each(
    "gather index_select scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce", _checked
)


# -- several dims ------------------------------------------------------------------------------------------------------


def _integers(x: torch.Tensor, indices: Indices) -> list[torch.Tensor | None]:
    """Return non-negative integer indices, one for each dim, or None; a mask becomes the indices where it is true.

    Raises:
        IndexError: one is out of range, on every rank.
    """
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            if index.shape != x.shape[len(found) : len(found) + index.dim()]:
                raise IndexError(f"a mask of shape {list(index.shape)} does not fit a tensor of {list(x.shape)}")
            found += torch.nonzero(index, as_tuple=True)
            continue
        if index is not None:
            n = x.shape[len(found)]
            check_ids(index, -n, n, _out_of_bounds(len(found), n))
            index = torch.where(index < 0, index + n, index) if n else index
        found.append(index)
    return found


def _local_places(
    places: list[Any], layout: MeshLayout, rank: int, device: torch.device
) -> tuple[list[int], torch.Tensor]:
    """Make `places` local and return the sharded dims that they index, and a mask of the elements on this rank."""
    cut = [k for k, place in enumerate(places) if isinstance(place, torch.Tensor) and layout.dims[k] is not None]
    is_own = torch.ones((), dtype=torch.bool, device=device)
    for k in cut:
        places[k], here = held(places[k], layout, rank, k)
        is_own = is_own & here
    return cut, is_own


def index_of(x: torch.Tensor, indices: Indices) -> torch.Tensor:
    """Return ``x[indices]`` for tensors, and None for dims that stay whole, one entry a dim (fewer: the first dims).

    Global shapes ``x y r, i, j i -> j i r``. Negative indices count from the end; a mask indexes all of its dims.
    """
    indices = _integers(x, indices)
    tensors = [index for index in indices if index is not None]
    whole = tuple(slice(None) if index is None else index for index in indices)
    if not any(isinstance(t, ShardedTensor) for t in (x, *tensors)):
        return x[whole]
    at = tuple(k for k, index in enumerate(indices) if index is not None)
    broad = tuple(torch.broadcast_shapes(*(index.shape for index in tensors)))
    rule = reading(tuple(x.shape), at, tuple(tuple(t.shape) for t in tensors), broad)
    if math.prod(broad) * math.prod(n for k, n in enumerate(x.shape) if k not in at) > x.numel():
        rule = attrs.evolve(rule, whole=frozenset(f"x{k}" for k in at))
    operands = (x, *tensors)
    chosen = chosen_sharding("index", rule, operands)
    if chosen is None:
        return fall_back(torch.Tensor.__getitem__, (x, whole), {})
    sharding, group = chosen

    def read_part(local: torch.Tensor, *ats: torch.Tensor) -> torch.Tensor:
        where = iter(ats)
        places: list[Any] = [slice(None) if index is None else next(where) for index in indices]
        cut, is_own = _local_places(places, sharding.needs[0].layout, group.rank, local.device)
        rest, first = [n for k, n in enumerate(local.shape) if k not in at], first_of(at)
        broad = torch.broadcast_shapes(*(places[k].shape for k in at))
        if cut and not all(local.shape[k] for k in at):
            return _nothing(local, (*rest[:first], *broad, *rest[first:]))
        found = local[tuple(places)]
        return (
            found.masked_fill(~is_own.expand(broad).reshape((*broad, *(1,) * (len(rest) - first))), 0) if cut else found
        )

    return run_as(sharding, group, operands, read_part)


@implements(torch.index_put, torch.Tensor.index_put)
def index_put(input: torch.Tensor, indices: Indices, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """Return `input` with `values` at `indices`: ``x y r, !i, !i, i r -> x y r``; a mask indexes all of its dims."""
    given = list(indices)
    if any(t is not None and t.dtype == torch.uint8 for t in given):
        return fall_back(torch.index_put, (input, tuple(given), values, accumulate), {})
    indices = _integers(input, given)
    tensors = [index for index in indices if index is not None]
    at = tuple(k for k, index in enumerate(indices) if index is not None)
    broad = tuple(torch.broadcast_shapes(*(index.shape for index in tensors)))
    rest = [n for k, n in enumerate(input.shape) if k not in at]
    shape = (*rest[: first_of(at)], *broad, *rest[first_of(at) :])
    while values.dim() > len(shape) and values.shape[0] == 1:
        values = values.squeeze(0)
    if torch.broadcast_shapes(values.shape, shape) != shape:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {list(shape)}"
        )
    if not any(isinstance(t, ShardedTensor) for t in (input, *tensors, values)):
        return torch.ops.aten.index_put(input, indices, values, accumulate)
    rule = writing(tuple(input.shape), at, tuple(tuple(t.shape) for t in tensors), broad, tuple(values.shape))
    operands = (input, *tensors, values)
    chosen = chosen_sharding("index_put", rule, operands)
    if chosen is None:
        return fall_back(torch.index_put, (input, tuple(given), values, accumulate), {})
    sharding, group = chosen

    def write_part(local: torch.Tensor, *ats: torch.Tensor) -> torch.Tensor:
        *ats, local_values = ats  # type: ignore[assignment]
        where = iter(ats)
        places = [None if index is None else next(where) for index in indices]
        cut, is_own = _local_places(places, sharding.needs[0].layout, group.rank, local.device)
        if not cut:
            return torch.ops.aten.index_put(local, places, local_values, accumulate)
        if not all(local.shape[k] for k in cut[1:]):
            return in_graph(local.clone(), (local_values,))
        d, count = cut[0], local.shape[cut[0]]
        here = places[d]
        assert here is not None, "indices of a sharded dim"
        places[d] = torch.where(is_own, here, count)
        return torch.ops.aten.index_put(_with_spare(local, d), places, local_values, accumulate).narrow(d, 0, count)

    return run_as(sharding, group, operands, write_part)


# -- masks -------------------------------------------------------------------------------------------------------------


@implements(torch.masked_select, torch.Tensor.masked_select)
def masked_select(input: torch.Tensor, mask: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    """Return the elements where `mask` is true, in one dim, equal on every rank."""
    if out is not None:
        return write_out(lambda f, a, k: masked_select(*a), torch.masked_select, (input, mask), {"out": out})
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    if not shape:
        return fall_back(torch.masked_select, (input, mask), {})
    return index_of(input.expand(shape), [mask.expand(shape)])


@implements(torch.nonzero, torch.Tensor.nonzero)
def nonzero(input: torch.Tensor, *, out: Any = None, as_tuple: bool = False) -> Any:
    """Return where `input` is not zero, ``(found, dims)``, equal on every rank; gathers a boolean for each element."""
    if out is not None:
        return write_out(lambda f, a, k: nonzero(*a), torch.nonzero, (input,), {"out": out})
    is_set = (input != 0).detach()
    is_set = is_set.full_tensor() if isinstance(is_set, ShardedTensor) else is_set
    return torch.nonzero(is_set, as_tuple=True) if as_tuple else torch.nonzero(is_set)
