"""Which elements each rank sends to which, from one layout to another: intersections of boxes.

If several replicas hold the elements that a rank needs, it receives them from the one with its own coordinates along
the axes of the replicas. So every rank receives each element that it lacks exactly once.
"""

from __future__ import annotations

from functools import lru_cache

import attrs

from shardtensor.layout.box import Box
from shardtensor.layout.layout import Layout, Shape
from shardtensor.mesh import Ranks, coordinate


@attrs.frozen(eq=False)
class Region:
    """The place of a box in a rank's local tensor: `held`, slices of it, and there `within` of the view in `shape`.

    In a packed local tensor `held` is the range of the box that contains this one; else `shape` is None.
    """

    held: tuple[slice, ...]
    shape: Shape | None
    within: tuple[slice, ...]
    numel: int


@attrs.frozen(eq=False)
class Transfer:
    """The regions that one rank keeps, sends and receives, those of one peer in the order of the receiver's boxes.

    Attributes:
        keeps: pairs of regions of the old and the new local tensor.
        sends: for each member of the group, in its order, the regions of the old local tensor sent to it.
        receives: for each member, the regions of the new local tensor received from it.
    """

    keeps: tuple[tuple[Region, Region], ...]
    sends: tuple[tuple[Region, ...], ...]
    receives: tuple[tuple[Region, ...], ...]

    @property
    def received(self) -> int:
        """The number of elements received from other ranks."""
        return sum(region.numel for regions in self.receives for region in regions)

    @property
    def sent(self) -> int:
        """The number of elements sent to other ranks."""
        return sum(region.numel for regions in self.sends for region in regions)


@lru_cache(maxsize=1024)
def transfer(source: Layout, target: Layout, rank: int, members: Ranks) -> Transfer:
    """Return what `rank` keeps, sends and receives when `members` change the layout; neither layout is partial."""
    keeps: list[tuple[Region, Region]] = []
    sends: list[tuple[Region, ...]] = []
    receives: list[tuple[Region, ...]] = []
    for peer in members:
        if peer == rank:
            if _is_sender(source, rank, rank):
                keeps += _overlaps(source, rank, target, rank)
            sends.append(())
            receives.append(())
            continue
        sends.append(_to_send(source, rank, target, peer))
        receives.append(_to_receive(source, peer, target, rank))
    return Transfer(tuple(keeps), tuple(sends), tuple(receives))


def lacking(source: Layout, target: Layout, rank: int) -> int:
    """Return how many of the elements that `rank` holds in `target` it does not hold in `source`."""
    held = source.boxes(rank)
    overlaps = (box.overlap(goal) for goal in target.boxes(rank) for box in held)
    return target.numel(rank) - sum(both.numel for both in overlaps if both is not None)


def _to_send(source: Layout, rank: int, target: Layout, peer: int) -> tuple[Region, ...]:
    if not _is_sender(source, rank, peer):
        return ()
    return tuple(here for here, _ in _overlaps(source, rank, target, peer))


def _to_receive(source: Layout, peer: int, target: Layout, rank: int) -> tuple[Region, ...]:
    if not _is_sender(source, peer, rank):
        return ()
    return tuple(there for _, there in _overlaps(source, peer, target, rank))


def _is_sender(source: Layout, holder: int, receiver: int) -> bool:
    """Whether `holder` is the one of its replicas that sends to `receiver`."""
    place = coordinate(source.ranks, source.grid, holder)
    if place is None:
        return False
    parting = source.parting_axes
    own = coordinate(source.ranks, source.grid, receiver)
    if own is None:  # receivers outside of the grid are distributed round-robin over the replicas
        copies, index = 1, 0
        for axis, size in enumerate(source.grid):
            if axis not in parting:
                copies, index = copies * size, index * size + place[axis]
        return receiver % copies == index
    return all(place[axis] == own[axis] for axis in range(len(source.grid)) if axis not in parting)


def _overlaps(source: Layout, sender: int, target: Layout, receiver: int) -> list[tuple[Region, Region]]:
    """Return the regions of each box that `sender` holds and `receiver` needs, in both local tensors."""
    found = []
    here = list(zip(source.boxes(sender), source.local_boxes(sender), strict=True))
    for goal, goal_local in zip(target.boxes(receiver), target.local_boxes(receiver), strict=True):
        for box, local in here:
            both = box.overlap(goal)
            if both is not None:
                found.append((_region(both, box, local, source.packed), _region(both, goal, goal_local, target.packed)))
    return found


def _region(part: Box, box: Box, local: Box, packed: bool) -> Region:
    """Return the region of `part` of `box` in a local tensor that has the box at `local`."""
    within = part.seen_from(box)
    if packed:
        return Region(local.slices, box.sizes, within.slices, part.numel)
    offsets = tuple(a + b for a, b in zip(within.offsets, local.offsets, strict=True))
    return Region(Box(offsets, part.sizes).slices, None, (), part.numel)
