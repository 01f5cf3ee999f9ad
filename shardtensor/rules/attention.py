"""Whether grouped-query attention can run on local heads."""

from __future__ import annotations

from shardtensor.layout.layout import CutLayout
from shardtensor.rules.views import scaled


def heads_fit(query: CutLayout, key: CutLayout, value: CutLayout, groups: int) -> bool:
    """Whether each rank's query heads (`groups` for a key head) match its keys and values, and other dims are equal."""
    if query.partial or key.partial or value.partial:
        return False
    if not (query.grid == key.grid == value.grid and query.ranks == key.ranks == value.ranks):
        return False
    if key.dims != value.dims or any((*query.dims[-2:], *key.dims[-2:])) or query.dims[:-3] != key.dims[:-3]:
        return False
    heads, fewer = query.dims[-3], key.dims[-3]
    if heads is None or fewer is None:
        return heads is fewer
    return heads.axes == fewer.axes and heads.pieces == scaled(fewer.pieces, groups)
