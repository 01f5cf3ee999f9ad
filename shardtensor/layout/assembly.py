"""How the local tensors of a group, gathered end to end, make the whole tensor."""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.layout.box import Box
from shardtensor.layout.layout import CutLayout, FlatLayout, Layout, Shape
from shardtensor.layout.pieces import Blocked
from shardtensor.mesh import Ranks, coordinate


@attrs.frozen
class Contribution:
    """One rank's share of the gathered elements: where it starts, its local shape, and where its boxes go."""

    start: int
    local_shape: Shape
    local_boxes: tuple[Box, ...]
    boxes: tuple[Box, ...]


@attrs.frozen
class Assembly:
    """What each member of a group contributes to the whole tensor; copies beyond the first contribute nothing.

    Attributes:
        counts: elements that each member brings, in group order.
        contributions: of the members that bring any.
        in_order: whether the gathered elements already are the tensor, row-major.
    """

    counts: tuple[int, ...]
    contributions: tuple[Contribution, ...]
    in_order: bool


@lru_cache(maxsize=1024)
def assembly(layout: Layout, members: Ranks) -> Assembly:
    """Return who of `members` (global ranks, group order) brings what to the whole tensor of `layout`."""
    counts, contributions, start = [], [], 0
    for rank in members:
        brings = layout.numel(rank) if _holds_first_copy(layout, rank, members) else 0
        if brings:
            contributions.append(
                Contribution(start, layout.local_shape(rank), layout.local_boxes(rank), layout.boxes(rank))
            )
        counts.append(brings)
        start += brings
    return Assembly(tuple(counts), tuple(contributions), _in_order(layout, contributions))


def _holds_first_copy(layout: Layout, rank: int, members: Ranks) -> bool:
    """Of ranks that hold the same boxes, the one at the start of the axes that do not part the tensor, if a member."""
    place = coordinate(layout.ranks, layout.grid, rank)
    if place is None:
        return False
    parting = layout.parting_axes
    others = [axis for axis in range(len(layout.grid)) if axis not in parting]
    if all(place[axis] == 0 for axis in others):
        return True
    first, stride = layout.ranks.index(rank), 1
    for axis in reversed(range(len(layout.grid))):
        if axis in others:
            first -= place[axis] * stride
        stride *= layout.grid[axis]
    return layout.ranks[first] not in members


def _in_order(layout: Layout, contributions: list[Contribution]) -> bool:
    if isinstance(layout, CutLayout):
        if layout.cut_dims not in ((), (0,)):
            return False
        if layout.cut_dims and isinstance(layout.dims[0].pieces, Blocked):  # type: ignore[union-attr]
            return False
    elif not (isinstance(layout, FlatLayout) and not layout.inner.cut_dims):
        return False
    firsts = [contribution.boxes[0].offsets for contribution in contributions]
    return firsts == sorted(firsts)
