"""How the local tensors of a group, gathered end to end, make the whole tensor."""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.layout.box import Box
from shardtensor.layout.layout import CutLayout, FlatLayout, Layout, Shape
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
        brings = layout.numel(rank) if _contributes(layout, rank, members) else 0
        if brings:
            contributions.append(
                Contribution(start, layout.local_shape(rank), layout.local_boxes(rank), layout.boxes(rank))
            )
        counts.append(brings)
        start += brings
    return Assembly(tuple(counts), tuple(contributions), _in_order(layout, contributions))


def _contributes(layout: Layout, rank: int, members: Ranks) -> bool:
    """Whether a rank brings its elements: it holds the first copy of them, or the rank that does is no member."""
    place = coordinate(layout.ranks, layout.grid, rank)
    if place is None:
        return False
    if layout.holds_first_copy(rank):
        return True
    first, stride = layout.ranks.index(rank), 1
    for axis in reversed(range(len(layout.grid))):
        if axis not in layout.parting_axes:
            first -= place[axis] * stride
        stride *= layout.grid[axis]
    return layout.ranks[first] not in members


def _in_order(layout: Layout, contributions: list[Contribution]) -> bool:
    if isinstance(layout, CutLayout):
        if layout.cut_dims not in ((), (0,)) or (layout.cut_dims and layout.is_blocked(0)):
            return False
    elif not (isinstance(layout, FlatLayout) and not layout.inner.cut_dims):
        return False
    firsts = [contribution.boxes[0].offsets for contribution in contributions]
    return firsts == sorted(firsts)
