"""softmax and log_softmax: local over a whole dim; over a cut one the maximum and the sum are joined over the ranks."""

from __future__ import annotations

import torch

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.ops.by_rule import Cut, joins
from shardtensor.ops.engine import HALF
from shardtensor.ops.reductions import local_extreme


def shifted(local: torch.Tensor, dim: int, team: Group) -> torch.Tensor:
    """`local` less the maximum over `dim` in all ranks, which has no gradient: one all-reduce."""
    with torch.no_grad():
        top = team.all_reduce(local_extreme(local, (dim,), True), "max")
    return local - top


def joined_sum(local: torch.Tensor, dim: int, team: Group) -> torch.Tensor:
    """The sum over `dim` in all ranks (the dim stays), for use by each rank's part of the work."""
    return collectives.sum_gradient(collectives.all_reduce(local.sum(dim, keepdim=True), team), team)


@joins("exponentials")
def exponentials(cut: Cut) -> torch.Tensor:
    """softmax, log_softmax or softmin over a cut dim."""
    (local,), (d,) = cut.locals, cut.dims
    dtype = cut.options.get("dtype")
    if isinstance(cut.options["_stacklevel"], torch.dtype):  # Tensor.softmax(dim, dtype)
        dtype = cut.options["_stacklevel"]
    local = local if dtype is None else local.to(dtype)
    if not local.is_floating_point():
        torch.softmax(torch.empty(1, dtype=local.dtype), 0)  # torch's error
    wide = local.float() if local.dtype in HALF else local
    wide = shifted(-wide if cut.name == "softmin" else wide, d, cut.team)
    powers = wide.exp()
    total = joined_sum(powers, d, cut.team)
    return (wide - total.log() if cut.name == "log_softmax" else powers / total).to(local.dtype)
