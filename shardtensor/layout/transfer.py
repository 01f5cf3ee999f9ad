"""Which elements go from which rank to which, to turn one layout into another: exact intersections of boxes.

A rank that needs elements which several ranks hold copies of gets them from the one that stands where it stands itself
along the axes of the copies; so every rank receives exactly the elements that it needs and does not hold, once.
"""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.layout.box import Box
from shardtensor.layout.layout import Layout, Shape
from shardtensor.mesh import Ranks, coordinate


@attrs.frozen(eq=False)
class Region:
    """Where a box of the tensor lies in a rank's local tensor.

    Attributes:
        held: slices of the local tensor; all there is to do unless it is packed.
        shape: of a packed local tensor's range `held`, seen as the box that it holds; None where it is not packed.
        within: slices of that.
        numel: the number of elements.
    """

    held: tuple[slice, ...]
    shape: Shape | None
    within: tuple[slice, ...]
    numel: int


@attrs.frozen(eq=False)
class Transfer:
    """What one rank does: the pieces it keeps, sends and receives.

    Pieces that go to one peer follow one another in the order of the receiver's boxes, each row-major.

    Attributes:
        keeps: pairs of where elements are and where they go on this rank.
        sends: for each member of the team, in its order, the regions of the old local tensor that go there.
        receives: for each member, the regions of the new local tensor that come from there.
    """

    keeps: tuple[tuple[Region, Region], ...]
    sends: tuple[tuple[Region, ...], ...]
    receives: tuple[tuple[Region, ...], ...]

    @property
    def received(self) -> int:
        """Elements that come from other ranks."""
        return sum(region.numel for regions in self.receives for region in regions)

    @property
    def sent(self) -> int:
        """Elements that go to other ranks."""
        return sum(region.numel for regions in self.sends for region in regions)


@lru_cache(maxsize=1024)
def transfer(source: Layout, target: Layout, rank: int, members: Ranks) -> Transfer:
    """Return what `rank` does when `members` turn `source` into `target`; neither has addends left to reduce.

    Example:
        >>> from shardtensor.layout.layout import CutLayout, DimCut
        >>> from shardtensor.layout.pieces import chunked
        >>> cut = DimCut((0,), chunked(4, 2))
        >>> rows = CutLayout(shape=(4, 4), ranks=range(2), grid=(2,), dims=(cut, None))
        >>> columns = CutLayout(shape=(4, 4), ranks=range(2), grid=(2,), dims=(None, cut))
        >>> step = transfer(rows, columns, 0, range(2))
        >>> step.received, step.sends[1][0].held
        (4, (slice(0, 2, None), slice(2, 4, None)))
    """
    keeps: list[tuple[Region, Region]] = []
    sends: list[tuple[Region, ...]] = []
    receives: list[tuple[Region, ...]] = []
    for peer in members:
        if peer == rank:
            if _serves(source, rank, rank):
                keeps += _pieces(source, rank, target, rank)
            sends.append(())
            receives.append(())
            continue
        sends.append(_going(source, rank, target, peer))
        receives.append(_coming(source, peer, target, rank))
    return Transfer(tuple(keeps), tuple(sends), tuple(receives))


def moved(source: Layout, target: Layout, rank: int, members: Ranks) -> tuple[tuple[int, Box], ...]:
    """Return the boxes of the tensor that `rank` receives when `members` turn `source` into `target`, and from whom.

    Example:
        >>> from shardtensor.layout.layout import CutLayout, DimCut
        >>> from shardtensor.layout.pieces import chunked
        >>> cut = DimCut((0,), chunked(4, 2))
        >>> rows = CutLayout(shape=(4, 4), ranks=range(2), grid=(2,), dims=(cut, None))
        >>> columns = CutLayout(shape=(4, 4), ranks=range(2), grid=(2,), dims=(None, cut))
        >>> [(giver, str(box)) for giver, box in moved(rows, columns, 0, range(2))]
        [(1, '[2:4, 0:2]')]
    """
    goals = target.boxes(rank)
    return tuple(
        (giver, both)
        for giver in members
        if giver != rank and _serves(source, giver, rank)
        for goal in goals
        for box in source.boxes(giver)
        if (both := box.overlap(goal)) is not None
    )


def _going(source: Layout, rank: int, target: Layout, peer: int) -> tuple[Region, ...]:
    if not _serves(source, rank, peer):
        return ()
    return tuple(here for here, _ in _pieces(source, rank, target, peer))


def _coming(source: Layout, peer: int, target: Layout, rank: int) -> tuple[Region, ...]:
    if not _serves(source, peer, rank):
        return ()
    return tuple(there for _, there in _pieces(source, peer, target, rank))


def _serves(source: Layout, holder: int, taker: int) -> bool:
    """Whether `holder`, of all ranks that hold copies of its elements, is the one that gives them to `taker`."""
    place = coordinate(source.ranks, source.grid, holder)
    if place is None:
        return False
    parting = source.parting_axes
    own = coordinate(source.ranks, source.grid, taker)
    if own is None:  # it holds nothing itself: takers from outside are dealt to the copies in turn
        copies, index = 1, 0
        for axis, size in enumerate(source.grid):
            if axis not in parting:
                copies, index = copies * size, index * size + place[axis]
        return taker % copies == index
    return all(place[axis] == own[axis] for axis in range(len(source.grid)) if axis not in parting)


def _pieces(source: Layout, giver: int, target: Layout, taker: int) -> list[tuple[Region, Region]]:
    """Every box that `giver` holds of what `taker` needs, where it is and where it goes."""
    found = []
    here = list(zip(source.boxes(giver), source.local_boxes(giver), strict=True))
    for goal, goal_local in zip(target.boxes(taker), target.local_boxes(taker), strict=True):
        for box, local in here:
            both = box.overlap(goal)
            if both is not None:
                found.append((_region(both, box, local, source.packed), _region(both, goal, goal_local, target.packed)))
    return found


def _region(part: Box, box: Box, local: Box, packed: bool) -> Region:
    """Where `part` of `box` lies in a local tensor that has the box at `local`."""
    away = tuple(a - b for a, b in zip(part.offsets, box.offsets, strict=True))
    if packed:
        return Region(local.slices, box.sizes, Box(away, part.sizes).slices, part.numel)
    offsets = tuple(a + b for a, b in zip(away, local.offsets, strict=True))
    return Region(Box(offsets, part.sizes).slices, None, (), part.numel)
