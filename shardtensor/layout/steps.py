"""The steps of a reshard, each from one layout to the next. Integers only.

==================  ==============================================================  =============================
step                what it does                                                    each of n ranks receives
==================  ==============================================================  =============================
``slice``           every rank keeps a part of its elements                         nothing
``all_gather``      every rank gets the even shards of all                          the shards of the others
``all_to_all``      every rank gets the elements that it lacks                      the elements that it lacks
``send_recv``       the same between two sets of ranks                              the elements that it lacks
``reduce_scatter``  partial values are reduced, every rank keeps its shard          n - 1 times its shard
``all_reduce``      partial values are reduced on every rank                        2 (n - 1) / n of the tensor
``split``           the value becomes partial: one rank holds it, the others zeros  nothing
==================  ==============================================================  =============================
"""

from __future__ import annotations

import math

import attrs

from shardtensor.layout.layout import CutLayout, Layout
from shardtensor.layout.transfer import Transfer, lacking, transfer
from shardtensor.mesh import Mesh, Ranks, as_ranks


@attrs.frozen(cache_hash=True)
class Step:
    """One step of a reshard.

    Attributes:
        kind: a name in the table above.
        source: the layout before.
        target: the layout after.
        axes: axes of the common grid along which ranks communicate; None for all ranks.
        op: the reduction; empty for a step that does not reduce.
    """

    kind: str
    source: Layout
    target: Layout
    axes: tuple[int, ...] | None = None
    op: str = ""

    def members(self, rank: int) -> Ranks:
        """Return the group of `rank` in this step: its ranks, in group order."""
        if self.axes is None:
            return as_ranks(sorted({*self.source.ranks, *self.target.ranks}))
        mesh = Mesh(tuple((f"axis{i}", n) for i, n in enumerate(self.source.grid)), self.source.ranks)
        return as_ranks(sorted(mesh.ranks_along(rank, self.axes)))

    def transfer(self, rank: int) -> Transfer:
        """Return what `rank` keeps, sends and receives in a step that does not reduce."""
        return transfer(self.source, self.target, rank, self.members(rank))

    @property
    def group_size(self) -> int:
        """The number of ranks of each group."""
        if self.axes is None:
            return len({*self.source.ranks, *self.target.ranks})
        return math.prod(self.source.grid[axis] for axis in self.axes)

    def received(self, rank: int) -> int:
        """Return the number of elements that `rank` receives, with ring algorithms."""
        if self.kind in ("slice", "split"):
            return 0
        if self.kind == "reduce_scatter":
            return (self.group_size - 1) * self.target.numel(rank)
        if self.kind == "all_reduce":
            return -(-2 * (self.group_size - 1) * self.source.numel(rank) // self.group_size)
        return lacking(self.source, self.target, rank)

    @property
    def where(self) -> str:
        """The axes with their sizes, or the number of ranks, for messages."""
        if self.axes is None:
            return f"{self.group_size} ranks"
        return " * ".join(f"{self.source.axis_name(axis)}={self.source.grid[axis]}" for axis in self.axes)


def is_even(layout: CutLayout, axes: tuple[int, ...]) -> bool:
    """Whether all ranks along `axes` hold the same number of elements: dims cut along them have shards of one size."""
    cuts = [cut.pieces for cut in layout.dims if cut is not None and not set(axes).isdisjoint(cut.axes)]
    return all(len({pieces.size(i) for i in range(pieces.count)}) == 1 for pieces in cuts)
