"""ZeRO: the owner of each parameter, buckets and their ranges, the bytes that each rank holds. Integers only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Literal

import attrs

from shardtensor.layout.ranges import REDUCE_BUFFERS, Ranges, lay_out, lay_out_owned

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


@attrs.frozen
class Param:
    """A parameter: its number of elements, the bytes of one, whether it is trained, and which may share its buffer."""

    length: int
    itemsize: int
    trains: bool
    kind: Hashable


@attrs.frozen
class HeldBytes:
    """The bytes that one rank holds: parameters, gradients, each state tensor of an elementwise class, and buffers."""

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    buffers: int = 0


def held_bytes(params: Sequence[Param], ranks: int, rank: int, partition: Partition, *, is_reduced: bool) -> HeldBytes:
    """Return what one rank holds of parameters in one group, with an elementwise class.

    Args:
        is_reduced: gradients are reduced to the ranks that step them.
    """
    if partition == "owners" and not is_reduced:
        return _held_by_owners(params, ranks, rank)
    limit = bucket_bytes(sum(param.length * param.itemsize for param in params))
    plans = plan_buckets(
        [(param.kind, param.trains) for param in params],
        [param.length for param in params],
        ranks,
        [int(limit) // param.itemsize for param in params],
        partition,
        [1] * len(params),
        [0] * ranks,
    )
    parameters = gradients = state = buffers = 0
    packed: dict[Hashable, int] = {}
    for plan in plans:
        first = params[plan.members[0]]
        item, chunk = first.itemsize, plan.ranges.chunk
        parameters += plan.ranges.total * item
        if not first.trains:
            continue
        as_one = steps_as_one(plan, item, is_reduced)
        state += _stepped(plan, rank, as_one) * item
        if is_reduced:
            gradients += chunk * item
            packed[first.kind] = max(packed.get(first.kind, 0), plan.ranges.total * item)
        else:
            gradients += sum(params[i].length for i in plan.members) * item
            buffers += chunk * item if as_one else 0
    return HeldBytes(parameters, gradients, state, buffers + REDUCE_BUFFERS * sum(packed.values()))


def _held_by_owners(params: Sequence[Param], ranks: int, rank: int) -> HeldBytes:
    owners = assign_owners([param.length for param in params], [0] * ranks)
    sizes = [param.length * param.itemsize for param in params]
    trained = [size if param.trains else 0 for size, param in zip(sizes, params, strict=True)]
    packed: dict[Hashable, list[Param]] = {}
    for param, owner, size in zip(params, owners, sizes, strict=True):
        if size < SENT_ALONE_BYTES:
            packed.setdefault((owner, param.kind), []).append(param)
    buffers = sum(
        lay_out_owned([param.length for param in own], 1, [0] * len(own)).total * own[0].itemsize
        for own in packed.values()
    )
    state = sum(size for size, owner in zip(trained, owners, strict=True) if owner == rank)
    return HeldBytes(sum(sizes), sum(trained), state, buffers)


def _stepped(plan: BucketPlan, rank: int, as_one: bool) -> int:
    """Return how many elements of a bucket a rank steps, and if adjacent ones are one tensor, of padding between."""
    lengths, cuts = plan.ranges.lengths, plan.ranges.cuts(rank)
    sizes = cuts[1::2]
    held = [j for j, size in enumerate(sizes) if size or not (lengths[j] or rank)]
    if not as_one:
        return sum(sizes)
    if len(held) == len(lengths) > 1:
        return plan.ranges.chunk
    runs = [list(run) for _, run in groupby(held, lambda j: j - held.index(j))]
    return sum(sum(cuts[2 * run[0] + 1 : 2 * run[-1] + 2]) for run in runs)
