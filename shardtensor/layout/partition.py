"""ZeRO: the owner of each parameter, buckets and their ranges. Integers only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import attrs

from shardtensor.layout.ranges import Ranges, lay_out, lay_out_owned

Partition = Literal["owners", "ranges"]

SENT_ALONE_BYTES = 1 << 18
"""Smaller tensors are copied into one buffer to be sent or stepped: a call for each costs the host more."""

_WASTE = 8  # at most 1 / 8 of a bucket may be padding


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Assign each parameter to a rank: the largest first, each to the rank with the fewest elements so far.

    Args:
        sizes: the number of elements of each parameter.
        loads: the elements that each rank has already; updated.

    Returns:
        the owner of each parameter.

    Example:
        >>> assign_owners([9, 7, 5, 3, 9, 7, 5, 3], [0, 0])
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


@attrs.frozen
class BucketPlan:
    """Parameters that share a flat buffer.

    Attributes:
        members: their numbers, in the order in which they lie in the buffer.
        ranges: where they lie, and which elements each rank steps.
    """

    members: tuple[int, ...]
    ranges: Ranges

    def owner(self, place: int) -> int | None:
        """Return the rank that steps all of the parameter at a place among the members, if one does."""
        sizes = self.ranges.sizes(place)
        return sizes.index(max(sizes)) if max(sizes) == sum(sizes) else None


def plan_buckets(
    kinds: Sequence[Hashable],
    lengths: Sequence[int],
    ranks: int,
    limits: Sequence[int],
    partition: Partition,
    grains: Sequence[int],
    loads: list[int],
) -> list[BucketPlan]:
    """Assign parameters to buckets, the last ones first: the order in which backward computes gradients.

    A bucket has parameters of one kind. It is full at its limit; with owners, it also has to be balanced.

    Args:
        kinds: of each parameter; only equal ones may share a bucket.
        lengths: the number of elements of each parameter.
        limits: for each parameter, the number of elements at which a bucket of its kind is full.
        partition: whether ranks own whole parameters or equal ranges.
        grains: with ranges, how many consecutive elements of each parameter no range divides.
        loads: with owners, the elements that each rank has already; updated.

    Returns:
        the buckets, in the order in which backward fills them.

    Example:
        >>> plans = plan_buckets(["a"] * 4, [32, 16, 16, 32], 2, [48] * 4, "ranges", [1] * 4, [0, 0])
        >>> [(plan.members, plan.ranges.chunk) for plan in plans]
        [((2, 3), 32), ((0, 1), 32)]
    """
    open_: dict[Hashable, list[int]] = {}
    plans: list[BucketPlan] = []
    for i in reversed(range(len(kinds))):
        members = open_.setdefault(kinds[i], [])
        members.append(i)
        if sum(lengths[j] for j in members) < limits[i]:
            continue
        if partition == "ranges":
            plans.append(_divided(open_.pop(kinds[i]), lengths, ranks, grains))
            continue
        tried = list(loads)
        plan = _owned(members, lengths, ranks, tried)
        if plan.ranges.waste * _WASTE <= plan.ranges.total:
            loads[:] = tried
            plans.append(plan)
            del open_[kinds[i]]
    for members in open_.values():
        divided = partition == "ranges"
        plans.append(_divided(members, lengths, ranks, grains) if divided else _owned(members, lengths, ranks, loads))
    return plans


def _divided(members: Sequence[int], lengths: Sequence[int], ranks: int, grains: Sequence[int]) -> BucketPlan:
    order = tuple(sorted(members))
    ranges = lay_out([lengths[i] for i in order], ranks, [grains[i] for i in order])
    return BucketPlan(order, ranges)


def _owned(members: Sequence[int], lengths: Sequence[int], ranks: int, loads: list[int]) -> BucketPlan:
    order = sorted(members)
    owners = assign_owners([lengths[i] for i in order], loads)
    by_owner = sorted(zip(owners, order, strict=True))
    ranges = lay_out_owned([lengths[i] for _, i in by_owner], ranks, [owner for owner, _ in by_owner])
    return BucketPlan(tuple(i for _, i in by_owner), ranges)


def bucket_bytes(total_bytes: int) -> float:
    """Return the size at which a bucket is full: few buckets cost the host less, many overlap more."""
    return min(max(total_bytes / 16, 25 * 2**20), 256 * 2**20)


def steps_as_one(plan: BucketPlan, itemsize: int, is_reduced: bool) -> bool:
    """Whether an elementwise class steps a rank's range as one tensor: if the gradients are adjacent, or small enough
    to be copied together."""
    most = SENT_ALONE_BYTES * (len(plan.members) // plan.ranges.ranks + 1)
    return is_reduced or plan.ranges.chunk * itemsize <= most
