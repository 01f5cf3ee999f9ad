"""`Profile`: the speed and memory of a kind of machine, from the package or a user's file; the time of a collective.

Time depends on the bytes that one rank receives, the group's size, and the nodes of its ranks. Bytes are those of ring
algorithms, without arithmetic in switches, as in `layout.route`: for a tensor of S bytes among n ranks each rank
receives 2 (n - 1) / n S bytes in an all-reduce, and (n - 1) / n S in an all-gather, a reduce-scatter or an all-to-all.
A ring over several nodes enters each node through the links of all its k ranks, each with 1 / k of the bytes; the
slower kind of link determines the time. Latency between nodes grows as in trees.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import attrs

from shardtensor.errors import LayoutError


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@attrs.frozen
class Curve:
    """Measured points of one collective among `group_size` ranks, with interpolation.

    Between two points the time is a power of the bytes. Below the first point it is constant (latency); above the last
    it is linear, with the slope of the last two points (bandwidth).

    Args:
        group_size: the number of ranks that were measured; of nodes, for a curve between nodes.
        hop_s: the seconds that each further step of the algorithm adds.
        received_bytes: the bytes that one rank receives at each point, in ascending order.
        seconds: the time of each point.

    Example:
        >>> curve = Curve(4, 1e-6, (1 << 10, 1 << 20), (10e-6, 40e-6))
        >>> [round(1e6 * curve.at(1 << n)) for n in (0, 10, 15, 20, 21)]
        [10, 10, 20, 40, 70]
    """

    group_size: int
    hop_s: float
    received_bytes: tuple[float, ...] = attrs.field(converter=_floats)
    seconds: tuple[float, ...] = attrs.field(converter=_floats)

    def __attrs_post_init__(self) -> None:
        grows = all(a < b for a, b in pairwise(self.received_bytes))
        if (
            not (self.received_bytes and len(self.received_bytes) == len(self.seconds) and grows)
            or min(*self.received_bytes, *self.seconds, math.inf) <= 0
        ):
            raise LayoutError(
                "a curve needs ascending numbers of bytes and a time for each, all above 0",
                {"received_bytes": list(self.received_bytes), "seconds": list(self.seconds)},
            )

    def at(self, received_bytes: float) -> float:
        """Return the seconds for this many bytes, among `group_size` ranks."""
        sizes, seconds = self.received_bytes, self.seconds
        place = bisect_right(sizes, received_bytes)
        if place == 0:
            return seconds[0]
        if place < len(sizes):
            share = math.log(received_bytes / sizes[place - 1]) / math.log(sizes[place] / sizes[place - 1])
            return seconds[place - 1] * (seconds[place] / seconds[place - 1]) ** share
        if len(sizes) == 1:
            return seconds[0] * received_bytes / sizes[0]
        slope = max(seconds[-1] - seconds[-2], 0.0) / (sizes[-1] - sizes[-2])
        return seconds[-1] + (received_bytes - sizes[-1]) * slope

    def scaled(self, received_bytes: float, hops: float) -> float:
        """Return `at` with the time of `hops` more steps of the algorithm; fewer if negative."""
        base = self.at(received_bytes)
        return max(base / 2, base + hops * self.hop_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the curve as a profile's file stores it."""
        return attrs.asdict(self)


KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
"""The collectives for which a profile has curves."""

_PACKAGED = Path(__file__).parent / "profiles"


@attrs.frozen
class Profile:
    """The speed of communication and arithmetic on one kind of machine.

    Attributes:
        name: of the machine.
        about: the source of the numbers.
        ranks_per_node: the number of ranks connected by the links of `within`.
        memory_bytes: of one device.
        memory_bytes_per_s: memory bandwidth of one device.
        flops_per_s: of large matmuls on one device, by dtype.
        efficiency: the fraction of `flops_per_s` that the matmuls of a training step reach.
        within: a curve for each kind of collective among the ranks of one node.
        between: a curve for each kind among nodes, one rank of each; its bytes pass through the links of one rank.
    """

    name: str
    about: str
    ranks_per_node: int
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    efficiency: float
    within: Mapping[str, Curve]
    between: Mapping[str, Curve]

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s that matmuls of this dtype reach in a step; an unknown dtype has those of the slowest."""
        return self.flops_per_s.get(dtype, min(self.flops_per_s.values())) * self.efficiency

    def as_text(self) -> str:
        """Return the text of its file, which `read_profile` reads."""
        fields = attrs.asdict(self, recurse=False)
        for link in ("within", "between"):
            fields[link] = {kind: curve.as_dict() for kind, curve in fields[link].items()}
        return json.dumps(fields, indent=2) + "\n"


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles in the package.

    Example:
        >>> profile_names()
        ('cpu', 'h100', 'h200')
    """
    return tuple(sorted(path.stem for path in _PACKAGED.glob("*.json")))


@lru_cache(maxsize=64)
def read_profile(name: str | Path) -> Profile:
    """Return the profile with this name, or from a file that ``shardtensor plan --calibrate`` wrote.

    Args:
        name: one of `profile_names`, or the path of a JSON file.

    Raises:
        LayoutError: (a ValueError) there is no such profile, or the file is not one.

    Example:
        >>> profile = read_profile("h100")
        >>> profile.ranks_per_node, sorted(profile.within)
        (8, ['all_gather', 'all_reduce', 'all_to_all', 'reduce_scatter'])
    """
    path = _PACKAGED / f"{name}.json" if str(name) in profile_names() else Path(name)
    try:
        return _from(json.loads(path.read_text()))
    except FileNotFoundError:
        raise LayoutError(
            f"there is no hardware profile `{name}`",
            {"known": ", ".join(profile_names())},
            "name one of these, or the file that `shardtensor plan --calibrate FILE` wrote",
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        detail = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise LayoutError(
            f"`{path}` is no hardware profile",
            {"found": detail},
            "write a fresh one: shardtensor plan --calibrate FILE",
        ) from None


def _from(fields: Mapping[str, Any]) -> Profile:
    unknown = set(fields) - {field.name for field in attrs.fields(Profile)}
    if unknown:
        raise ValueError(f"unknown key {', '.join(sorted(unknown))}")
    links = {link: {kind: Curve(**fields[link][kind]) for kind in KINDS} for link in ("within", "between")}
    values = {field.name: fields[field.name] for field in attrs.fields(Profile)}
    return Profile(**{**values, **links})


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
