"""How the parameters of a gather unit lie end to end, and which range of them each rank holds. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs

ALIGNMENT = 16
"""Elements; every parameter starts at a multiple, so that kernels find their vectors aligned."""


@attrs.frozen
class Ranges:
    """Parameters end to end, cut into one equal range a rank.

    Args:
        lengths: elements of each parameter.
        starts: where each begins; what is between them, and after the last, is padding.
        chunk: elements of a rank's range.
        ranks: how many ranges.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    chunk: int
    ranks: int

    @property
    def total(self) -> int:
        """Elements of the whole, padding included."""
        return self.chunk * self.ranks

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """The part of a parameter that a rank holds, as a range of its own elements; perhaps empty."""
        start, length = self.starts[index], self.lengths[index]
        low, high = rank * self.chunk - start, (rank + 1) * self.chunk - start
        return min(max(low, 0), length), min(max(high, 0), length)

    def sizes(self, index: int) -> tuple[int, ...]:
        """How many elements of a parameter each rank holds."""
        pieces = (self.piece(index, rank) for rank in range(self.ranks))
        return tuple(stop - start for start, stop in pieces)

    def cuts(self, rank: int) -> list[int]:
        """Sizes that cut a range into gaps and pieces in turn: a gap before each parameter, and one at the end."""
        found, end = [], 0
        for index, start in enumerate(self.starts):
            place = min(max(start - rank * self.chunk, end), self.chunk)
            low, high = self.piece(index, rank)
            found += [place - end, high - low]
            end = place + high - low
        return [*found, self.chunk - end]

    def all_cuts(self) -> list[int]:
        """The same of the whole."""
        return attrs.evolve(self, chunk=self.total, ranks=1).cuts(0)


def lay_out(lengths: Sequence[int], ranks: int) -> Ranges:
    """Lay parameters of these lengths end to end and cut them into `ranks` equal ranges.

    Example:
        >>> ranges = lay_out([40, 8], 2)
        >>> ranges.starts, ranges.chunk, ranges.sizes(0), ranges.sizes(1)
        ((0, 48), 32, (32, 8), (0, 8))
    """
    ends = accumulate((_up(length, ALIGNMENT) for length in lengths), initial=0)
    *starts, total = ends
    chunk = _up(-(-total // ranks), ALIGNMENT)
    return Ranges(tuple(lengths), tuple(starts), chunk, ranks)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
