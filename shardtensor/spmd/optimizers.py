"""Steps of the user's optimizers, on plain parameters or on the local tensors of sharded ones."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import optim

from shardtensor.optim.flat_groups import FlatGroups, step_without_hooks
from shardtensor.optim.named_params import ParamRecord
from shardtensor.optim.sharded_optimizer import ShardedOptimizer
from shardtensor.optim.state import ParamState
from shardtensor.optim.update_units import update_unit
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap


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

    def step(own: optim.Optimizer) -> None:
        flats.step(own.param_groups, partial(step_without_hooks, inner))
        for group in inner.param_groups:
            if group.get("fused"):  # its kernels do not increment versions
                torch._C._increment_version(group["params"])

    return partial(optim.Optimizer.profile_hook_step(step), optimizer)  # with the user's hooks around it


def _local(value: Any) -> Any:
    return value._local if isinstance(value, ShardedTensor) else value


@torch.no_grad()
def shard_states(optimizers: Iterable[optim.Optimizer]) -> None:
    """Shard state tensors that have the shape of their parameter, as the parameter has been sharded. Sends nothing."""
    for optimizer in optimizers:
        for param, own in list(optimizer.state.items()):
            if isinstance(param, ShardedTensor) and not isinstance(optimizer, ShardedOptimizer):
                own.update({key: _sharded(value, param) for key, value in own.items()})


def _sharded(value: Any, param: ShardedTensor) -> Any:
    is_like = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.dim() > 0
    if not is_like or value.shape != param.shape:
        return value
    local = local_as(value, param._layout, param._group)
    kept = torch.empty_like(param._local, dtype=value.dtype, requires_grad=False).copy_(local)
    return wrap(kept, param._layout, None, param._group)
