"""Steps of the user's optimizers, on plain parameters or on the local tensors of sharded ones."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import optim

from shardtensor.fsdp.param_group import ParamGroup
from shardtensor.optim.flat_groups import FlatGroups, step_without_hooks
from shardtensor.optim.named_params import ParamRecord
from shardtensor.optim.sharded_optimizer import ShardedOptimizer
from shardtensor.optim.state import ParamState
from shardtensor.optim.update_units import update_unit
from shardtensor.tensor.sharded_tensor import ShardedTensor, wrap


def step_of(optimizer: optim.Optimizer, names: dict[int, str]) -> Callable[[], Any]:
    """Return the function that steps an optimizer in compiled steps.

    A torch optimizer over sharded parameters whose class updates each element alone steps local tensors, those of a
    unit as one; its state and groups stay the user's, with sharded parameters.
    """
    sharded = any(isinstance(p, ShardedTensor) for group in optimizer.param_groups for p in group["params"])
    if isinstance(optimizer, ShardedOptimizer) or not sharded or update_unit(type(optimizer)) != "element":
        return optimizer.step
    records = {
        id(param): ParamRecord.of(names.get(id(param), str(i)), param)
        for group in optimizer.param_groups
        for i, param in enumerate(group["params"])
    }
    inner = copy.copy(optimizer)
    inner.state = defaultdict(dict)
    inner.param_groups = [
        {**group, "params": [records[id(param)].leaf for param in group["params"]]} for group in optimizer.param_groups
    ]
    for param, own in list(optimizer.state.items()):
        inner.state[records[id(param)].leaf] = {key: _local(value) for key, value in own.items()}
    flats = FlatGroups(inner)
    optimizer.state = ParamState(flats, records)  # type: ignore[assignment]

    def step() -> None:
        flats.step(optimizer.param_groups, partial(step_without_hooks, inner))
        for group in inner.param_groups:
            if group.get("fused"):  # its kernels do not increment versions
                torch._C._increment_version(group["params"])

    return step


def _local(value: Any) -> Any:
    return value._local if isinstance(value, ShardedTensor) else value


def shard_states(optimizers: Iterable[optim.Optimizer], groups: Sequence[ParamGroup]) -> None:
    """Shard state tensors that have the shape of their parameter, as the parameter has been sharded. Sends nothing."""
    places = {id(param): (group, i) for group in groups for i, param in enumerate(group.sharded_params)}
    for optimizer in optimizers:
        for param, own in optimizer.state.items():
            if id(param) in places:
                group, i = places[id(param)]
                own.update({key: _sharded(value, group, i) for key, value in own.items()})


@torch.no_grad()
def _sharded(value: Any, group: ParamGroup, i: int) -> Any:
    param = group.sharded_params[i]
    is_like = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.dim() > 0
    if not is_like or value.shape != param.shape:
        return value
    start, stop = group.bucket.ranges.piece(i, group.bucket.index)
    stored = group.params_info[i].placement.stored(value)[start:stop]
    local = torch.empty_like(param._local, dtype=value.dtype, requires_grad=False)
    local.copy_(group.params_info[i].placement.as_param(stored, tuple(local.shape)))
    return wrap(local, param._layout, None, param._group)
