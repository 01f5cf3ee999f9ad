"""The steps that a reshard is made of, each from one layout to the next. Integers only.

==================  ==============================================================  =============================
step                what it does                                                    a rank receives, of n
==================  ==============================================================  =============================
``slice``           every rank takes its part of what it holds                      nothing
``all_gather``      equal parts are joined on every rank                            the parts of the others
``all_to_all``      every rank gets, from those that hold it, what it lacks         exactly what it lacks
``send_recv``       the same between two sets of ranks                              exactly what it lacks
``reduce_scatter``  addends are joined, every rank keeps its part                   n - 1 parts like its own
``all_reduce``      addends are joined on every rank                                2 (n - 1) / n of the tensor
``split``           the value becomes addends: one brings it, the others zeros      nothing
==================  ==============================================================  =============================
"""

from __future__ import annotations

import math

import attrs

from shardtensor.layout.layout import CutLayout, Layout
from shardtensor.layout.transfer import Transfer, transfer
from shardtensor.mesh import Mesh, Ranks, as_ranks


@attrs.frozen(cache_hash=True)
class Step:
    """One move of a reshard.

    Attributes:
        kind: one of the table above.
        source: the layout before.
        target: the layout after.
        axes: of the grid that both share, along which ranks exchange; None when all ranks take part.
        op: how addends are joined; empty for a move.
    """

    kind: str
    source: Layout
    target: Layout
    axes: tuple[int, ...] | None = None
    op: str = ""

    def members(self, rank: int) -> Ranks:
        """The ranks that exchange with `rank`, itself among them, in the order of their group."""
        if self.axes is None:
            return as_ranks(sorted({*self.source.ranks, *self.target.ranks}))
        mesh = Mesh(tuple((f"axis{i}", n) for i, n in enumerate(self.source.grid)), self.source.ranks)
        return as_ranks(sorted(mesh.ranks_along(rank, self.axes)))

    def transfer(self, rank: int) -> Transfer:
        """What `rank` keeps, sends and receives in a move."""
        return transfer(self.source, self.target, rank, self.members(rank))

    @property
    def team_size(self) -> int:
        """How many ranks exchange with one another."""
        if self.axes is None:
            return len({*self.source.ranks, *self.target.ranks})
        return math.prod(self.source.grid[axis] for axis in self.axes)

    def received(self, rank: int) -> int:
        """The number of elements that `rank` receives, by the algorithm of least traffic for the step."""
        if self.kind in ("slice", "split"):
            return 0
        if self.kind == "reduce_scatter":
            return (self.team_size - 1) * self.target.numel(rank)
        if self.kind == "all_reduce":
            return -(-2 * (self.team_size - 1) * self.source.numel(rank) // self.team_size)
        held = self.source.boxes(rank)  # a rank gets what it needs and does not hold, once
        overlaps = (box.overlap(goal) for goal in self.target.boxes(rank) for box in held)
        return self.target.numel(rank) - sum(both.numel for both in overlaps if both is not None)

    @property
    def where(self) -> str:
        """The axes, or the ranks, among which elements go, as messages say them."""
        if self.axes is None:
            return f"{self.team_size} ranks"
        return " * ".join(f"{self.source.axis_name(axis)}={self.source.grid[axis]}" for axis in self.axes)


def is_even(layout: CutLayout, axes: tuple[int, ...]) -> bool:
    """Whether all ranks along `axes` hold as many elements: every dim cut along them has pieces of one size."""
    cuts = [cut.pieces for cut in layout.dims if cut is not None and not set(axes).isdisjoint(cut.axes)]
    return all(len({pieces.size(i) for i in range(pieces.count)}) == 1 for pieces in cuts)
