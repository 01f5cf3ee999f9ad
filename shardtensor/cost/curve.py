"""`Curve`: the time of one kind of collective, by the bytes that a rank receives."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
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
