"""Redistributes plain local values as a flow states: ``[-, tp, ...] -> replicate``.

A move is a tuple of steps, made when the module is sharded; each has its gradient. Steps take local tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from shardtensor.comm import along_dim, collectives
from shardtensor.comm.along_dim import DimSizes
from shardtensor.comm.group import Group
from shardtensor.ops.linear import share


@attrs.frozen
class SumGradient:
    """Replicated to partial, for work that is split over the group: returns the value; sums its gradient."""

    team: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.sum_gradient(x, self.team)

    def shared(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Do the same for products with these weights, which share the all-reduce."""
        return share(x, weights, self.team)


@attrs.frozen
class Sum:
    """Partial to replicated, in place: the value is used nowhere else."""

    team: Group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce_fresh(x, self.team)


@attrs.frozen
class Gather:
    """Sharded to replicated; with `sums`, for work that is split over the group, the gradient is summed."""

    team: Group
    stretches: DimSizes
    sums: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return along_dim.all_gather(x, self.stretches, self.team, self.sums)

    def shared(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Do the same for products with these weights, which share the reduce-scatter, if there is one."""
        return share(x, weights, self.team, self.stretches) if self.sums else self(x)


@attrs.frozen
class Take:
    """Replicated to sharded: each rank keeps its slice."""

    team: Group
    stretches: DimSizes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return along_dim.local_slice(x, self.stretches, self.team)


@attrs.frozen
class SumScatter:
    """Partial to sharded: each rank gets its slice of the sum."""

    team: Group
    stretches: DimSizes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return along_dim.reduce_scatter(x, self.stretches, self.team)


Step = SumGradient | Sum | Gather | Take | SumScatter
Move = tuple[Step, ...]


def moved(x: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the redistributed value. All ranks of the groups call it."""
    for step in move:
        x = step(x)
    return x
