"""The time of a collective, by the bytes that one rank receives, the group's size, and the nodes of its ranks.

Bytes are those of ring algorithms, without arithmetic in switches, as in `layout.route`: for a tensor of S bytes among
n ranks each rank receives 2 (n - 1) / n S bytes in an all-reduce, and (n - 1) / n S in an all-gather, a reduce-scatter
or an all-to-all. A ring over several nodes enters each node through the links of all its k ranks, each with 1 / k of
the bytes; the slower kind of link determines the time. Latency between nodes grows as in trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from shardtensor.cost.profile import Profile
from shardtensor.errors import LayoutError

_LIKE = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "send_recv": "all_to_all",
    "scatter": "all_to_all",
    "broadcast": "all_gather",
    "exchange": "all_gather",
}
_FREE = ("slice", "split", "narrow", "")


def received_share(kind: str, group_size: int) -> float:
    """Return the bytes that a rank receives for each byte of the full tensor.

    Example:
        >>> received_share("all_reduce", 4), received_share("all_gather", 4)
        (1.5, 0.75)
    """
    share = (group_size - 1) / group_size
    return 2 * share if kind == "all_reduce" else share


def seconds(kind: str, received_bytes: float, group_size: int, profile: Profile, per_node: int | None = None) -> float:
    """Estimate the time of one collective on an idle machine.

    Args:
        kind: a collective, or a step of a reshard; steps that send nothing take no time.
        received_bytes: by one rank.
        group_size: the number of ranks of the group.
        per_node: how many of them share a node (see `ranks_in_node`); None: as many as a node has.

    Raises:
        LayoutError: (a ValueError) no collective has this name.

    Example:
        >>> from shardtensor.cost.profile import read_profile
        >>> h100 = read_profile("h100")
        >>> gather = seconds("all_gather", 384 << 20, 4, h100)
        >>> 1.0e-3 < gather < 1.6e-3, seconds("all_gather", 384 << 20, 4, h100, per_node=1) > 5 * gather
        (True, True)
    """
    if kind in _FREE or group_size <= 1 or received_bytes <= 0:
        return 0.0
    like = _LIKE.get(kind)
    if like is None:
        raise LayoutError(f'no collective is called "{kind}"', {"known": ", ".join(_LIKE)})
    together = min(group_size, profile.ranks_per_node if per_node is None else per_node)
    nodes = -(-group_size // together)
    if nodes == 1:
        return _within(like, received_bytes, group_size, profile)
    if like == "all_to_all":
        inside = received_bytes * (together - 1) / (group_size - 1)
        outside = received_bytes - inside
    else:
        inside, outside = received_bytes, received_bytes / together
    curve = profile.between[like]
    turns = 2 if like == "all_reduce" else 1
    hops = turns * (math.log2(nodes) - math.log2(curve.group_size))
    across = curve.scaled(outside, hops)
    return max(across, _within(like, inside, together, profile)) if together > 1 else across


def _within(kind: str, received_bytes: float, group_size: int, profile: Profile) -> float:
    curve = profile.within[kind]
    turns = 2 if kind == "all_reduce" else 1
    return curve.scaled(received_bytes, turns * (group_size - curve.group_size))


@lru_cache(maxsize=4096)
def ranks_in_node(sizes: Sequence[int], axes: Sequence[int], ranks_per_node: int) -> int:
    """Return how many ranks of a group along some axes of a row-major mesh share a node.

    Args:
        sizes: of all axes of the mesh, whose first rank is the first of a node.
        axes: the numbers of the axes of the group.

    Example:
        >>> ranks_in_node((16, 8), (1,), 8), ranks_in_node((16, 8), (0,), 8), ranks_in_node((16, 4), (0,), 8)
        (8, 1, 2)
    """
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    near = (range(min(sizes[axis], -(-ranks_per_node // strides[axis]))) for axis in axes)
    offsets = (sum(i * strides[axis] for i, axis in zip(place, axes, strict=True)) for place in product(*near))
    return max(sum(offset < ranks_per_node for offset in offsets), 1)
