"""What a mask selects: masked_select, ``x[mask]``, nonzero, and writing there.

How many elements there are is known only when they have been counted: each rank selects from its rows, the ranks tell
each other how many they have, and the result is cut as its rows were: ``m !m r, m !m -> m' r``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardtensor.comm.group import Group
from shardtensor.layout.layout import CutLayout, DimCut, replicated
from shardtensor.layout.pieces import listed
from shardtensor.ops.along_dim import pieces_of
from shardtensor.ops.engine import prepare, write_out
from shardtensor.rules.advanced import selecting
from shardtensor.tensor.dispatch import implements
from shardtensor.tensor.fallback import fall_back
from shardtensor.tensor.move import along
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap


class Rows(NamedTuple):
    """A tensor and its mask, side by side and cut along the first dim the same way."""

    local: torch.Tensor
    mask: torch.Tensor
    layout: CutLayout
    group: Group

    def selected(self, count: int, rest: tuple[int, ...], dims: tuple[DimCut | None, ...]) -> CutLayout:
        """The layout of as many rows as all ranks select, `count` on this one; `rest` and `dims` say the other dims."""
        layout, cut = self.layout, self.layout.dims[0]
        total, first = count, None
        if cut is not None:
            team = along(self.group, layout, cut.axes)
            counts = team.all_gather(torch.tensor([count], device=self.local.device)).tolist()
            sizes = [0] * cut.pieces.count
            for piece, n in zip(pieces_of(layout, cut, team), counts, strict=True):
                if piece >= 0:
                    sizes[piece] = int(n)
            total = sum(sizes)
            first = DimCut(cut.axes, listed(tuple(sizes)))
        shape = (total, *rest)
        if first is None and not any(dims):
            return replicated(shape, layout.ranks, layout.grid)
        return CutLayout(shape=shape, ranks=layout.ranks, grid=layout.grid, dims=(first, *dims), names=layout.names)


def rows_of(name: str, x: torch.Tensor, mask: torch.Tensor) -> Rows | None:
    """Bring a tensor and a mask of its first dims to where only the first of them is cut; None where that cannot be."""
    if (
        not (isinstance(x, ShardedTensor) or isinstance(mask, ShardedTensor))
        or not mask.dim()
        or tuple(x.shape[: mask.dim()]) != tuple(mask.shape)
    ):
        return None
    ready = prepare(name, selecting(x.dim(), mask.dim()), (x, mask))
    if ready is None or ready.recipe.needs[0].layout.is_blocked(0):
        return None
    (local, chosen), recipe, group = ready
    return Rows(local, chosen, recipe.needs[0].layout, group)


def select_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """``x[mask]`` for a mask of the first dims of `x`: ``(selected, rest...)``; None where it must be gathered."""
    if not isinstance(x, ShardedTensor) and not isinstance(mask, ShardedTensor):
        return x[mask]
    rows = rows_of("masked_select", x, mask)
    if rows is None:
        return None
    found = rows.local[rows.mask]
    layout = rows.selected(found.shape[0], tuple(x.shape[mask.dim() :]), rows.layout.dims[mask.dim() :])
    return found if layout.is_replicated else wrap(found, layout, None, rows.group)


def put(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """`x` with ``x[mask] = values``, a new tensor; `values` are broadcast to what the mask selects."""
    if not any(isinstance(t, ShardedTensor) for t in (x, mask, values)):
        return x.index_put((mask,), values)
    rows = rows_of("index_put", x, mask)
    if rows is None:
        return None
    rest = tuple(x.shape[mask.dim() :])
    layout = rows.selected(int(rows.mask.sum()), rest, rows.layout.dims[mask.dim() :])
    if torch.broadcast_shapes(values.shape, layout.shape) != layout.shape:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {list(layout.shape)}"
        )
    brought = local_as(values.expand(layout.shape), layout, rows.group)
    local = rows.local.index_put((rows.mask,), brought.to(rows.local.dtype))
    return local if rows.layout.is_replicated else wrap(local, rows.layout, None, rows.group)


@implements(torch.masked_select, torch.Tensor.masked_select)
def masked_select(input: torch.Tensor, mask: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    """The elements where `mask` is true, one dim; cut as the rows of `input` were."""
    if out is not None:
        return write_out(lambda f, a, k: masked_select(*a), torch.masked_select, (input, mask), {"out": out})
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    found = select_rows(input.expand(shape), mask.expand(shape)) if shape else None
    return fall_back(torch.masked_select, (input, mask), {}) if found is None else found


@implements(torch.nonzero, torch.Tensor.nonzero)
def nonzero(input: torch.Tensor, *, out: Any = None, as_tuple: bool = False) -> Any:
    """Where `input` is not zero, ``(found, dims)``; cut as the rows of `input` were."""
    if out is not None:
        return write_out(lambda f, a, k: nonzero(*a), torch.nonzero, (input,), {"out": out})
    is_set = (input != 0).detach()
    if not isinstance(is_set, ShardedTensor):
        return torch.nonzero(is_set, as_tuple=True) if as_tuple else torch.nonzero(is_set)
    rows = rows_of("nonzero", is_set, is_set)
    if rows is None:
        return fall_back(torch.nonzero, (input,), {"as_tuple": as_tuple})
    found = rows.mask.nonzero()
    if found.shape[0]:
        found[:, 0] += rows.layout.start(rows.group.rank, 0)
    layout = rows.selected(found.shape[0], (input.dim(),), (None,))
    result = found if layout.is_replicated else wrap(found, layout, None, rows.group)
    return tuple(result.unbind(1)) if as_tuple else result
