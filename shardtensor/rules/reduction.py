"""The layout of a result of a reduction over dims. Integers only."""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.layout.layout import CutLayout, Layout, replicated
from shardtensor.rules.propagate import with_dims


@attrs.frozen
class Reduction:
    """How to run one reduction.

    Attributes:
        layout: of the result, once reduced over `axes`.
        axes: along which the reduced dims are sharded; empty if the reduction is local.
        count: the number of elements that are reduced to one.
        dims: the dims of the local tensor to reduce; a packed one has one dim.
    """

    layout: CutLayout
    axes: tuple[int, ...]
    count: int
    dims: tuple[int, ...]


@lru_cache(maxsize=8192)
def reduction(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> Reduction | None:
    """Return how to reduce `dims` (not negative, sorted); None if listed boxes must be gathered first.

    Example:
        >>> from shardtensor.layout.layout import DimCut
        >>> from shardtensor.layout.pieces import chunked
        >>> rows = CutLayout(shape=(5, 4), ranks=range(2), grid=(2,), dims=(DimCut((0,), chunked(5, 2)), None))
        >>> reduction(rows, (0,), False).axes, reduction(rows, (1,), False).axes
        ((0,), ())
    """
    ndim = len(layout.shape)
    kept = tuple(d for d in range(ndim) if d not in dims)
    shape = tuple(1 if d in dims else n for d, n in enumerate(layout.shape)) if keepdim else ()
    shape = shape if keepdim else tuple(layout.shape[d] for d in kept)
    count = 1
    for d in dims:
        count *= layout.shape[d]
    if isinstance(layout, CutLayout):
        cuts = tuple(layout.dims[d] if d in kept else None for d in (range(ndim) if keepdim else kept))
        axes = tuple(sorted(axis for d in dims if (cut := layout.dims[d]) is not None for axis in cut.axes))
        return Reduction(with_dims(layout, shape, cuts), axes, count, dims)
    if kept:
        return None
    inner = (0,) if layout.packed else dims
    return Reduction(replicated(shape, layout.ranks, layout.grid), layout.parting_axes, count, inner)
