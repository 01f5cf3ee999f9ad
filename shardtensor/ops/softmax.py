"""softmax and log_softmax: local over a whole dim; over a cut one the maximum and the sum are joined over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm import collectives
from shardtensor.comm.group import Group
from shardtensor.layout.layout import CutLayout
from shardtensor.ops.reducing import HALF, local_extreme
from shardtensor.rules.dims import one_dim
from shardtensor.tensor.dispatch import HANDLERS, fall_back, spellings
from shardtensor.tensor.move import along
from shardtensor.tensor.sharded_tensor import ShardedTensor, settled, wrap


def shifted(local: torch.Tensor, dim: int, team: Group) -> torch.Tensor:
    """`local` less the maximum over `dim` in all ranks, which has no gradient: one all-reduce."""
    with torch.no_grad():
        top = team.all_reduce(local_extreme(local, (dim,), True), "max")
    return local - top


def joined_sum(local: torch.Tensor, dim: int, team: Group) -> torch.Tensor:
    """The sum over `dim` in all ranks (the dim stays), for use by each rank's part of the work."""
    return collectives.sum_gradient(collectives.all_reduce(local.sum(dim, keepdim=True), team), team)


def _over(name: str, log: bool) -> None:
    local_func = torch.log_softmax if log else torch.softmax

    def handler(input: ShardedTensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> torch.Tensor:
        if isinstance(_stacklevel, torch.dtype):  # Tensor.softmax(dim, dtype)
            dtype = _stacklevel
        if dim is None or not isinstance(input._layout, CutLayout):
            return fall_back(getattr(F, name), (input, dim), {"dtype": dtype})
        x = settled(input)
        layout, group = x._layout, x._group
        assert isinstance(layout, CutLayout)
        d = one_dim(x.dim(), dim)
        cut = layout.dims[d] if layout.shape else None
        if cut is None:
            local = local_func(x._local, d, dtype=dtype)
            return local if layout.is_whole_on_all(group.size) else wrap(local, layout, None, group)
        local = x._local if dtype is None else x._local.to(dtype)
        if not local.is_floating_point():
            local_func(torch.empty(1, dtype=local.dtype), 0)  # torch's error
        wide = local.float() if local.dtype in HALF else local
        team = along(group, layout, cut.axes)
        wide = shifted(wide, d, team)
        powers = wide.exp()
        total = joined_sum(powers, d, team)
        return wrap((wide - total.log() if log else powers / total).to(local.dtype), layout, None, group)

    for func in spellings(name):
        HANDLERS[func] = handler


_over("softmax", log=False)
_over("log_softmax", log=True)


def _softmin(input: ShardedTensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> torch.Tensor:
    return (-input).softmax(dim, dtype=dtype)


HANDLERS[F.softmin] = _softmin
