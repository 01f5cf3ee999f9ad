"""What brings a plain local value from one side of a flow to the other: ``[-, tp, ...] -> replicate``.

A move is a tuple of steps, settled when the module is sharded; each has its gradient. Steps see local tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from shardtensor.comm import along_dim, collectives
from shardtensor.comm.along_dim import DimSizes
from shardtensor.comm.group import Group
from shardtensor.ops import siblings


@attrs.frozen
class SumGradient:
    """A copy meets work that is split over the team: nothing forward, the gradient is summed."""

    team: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.sum_gradient(x, self.team)

    def shared(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same for products with these weights, which share the sum."""
        return siblings.share(x, weights, self.team)


@attrs.frozen
class Sum:
    """Addends, which nobody else uses, become a copy."""

    team: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce_fresh(x, self.team)


@attrs.frozen
class Gather:
    """Stretches become a copy; where work on it is split over the team (`sums`), the gradient is summed."""

    team: Group
    stretches: DimSizes
    sums: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return along_dim.all_gather(x, self.stretches, self.team, self.sums)

    def shared(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same for products with these weights, which share the sum, if there is one."""
        return siblings.share(x, weights, self.team, self.stretches) if self.sums else self(x)


@attrs.frozen
class Take:
    """Of a copy each rank keeps its stretch."""

    team: Group
    stretches: DimSizes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return along_dim.local_slice(x, self.stretches, self.team)


@attrs.frozen
class SumScatter:
    """Of the sum of addends each rank gets its stretch."""

    team: Group
    stretches: DimSizes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return along_dim.reduce_scatter(x, self.stretches, self.team)


Step = SumGradient | Sum | Gather | Take | SumScatter
Move = tuple[Step, ...]


def moved(x: torch.Tensor, move: Move) -> torch.Tensor:
    """The value on the other side of a flow. All ranks of the teams call it."""
    for step in move:
        x = step(x)
    return x
