"""Steps of the user's optimizers, on plain parameters or on the local tensors of sharded ones."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import optim

from shardtensor.optim.flat_groups import step_without_hooks
from shardtensor.optim.sharded_optimizer import ShardedOptimizer
from shardtensor.optim.update_units import update_unit
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, local_of, wrap


def step_of(optimizer: optim.Optimizer) -> Callable[[], Any]:
    """Return the function that steps an optimizer in compiled steps.

    A torch optimizer over sharded parameters whose class updates each element alone steps their local tensors; its
    state and groups stay the user's, with ShardedTensors. A `ShardedOptimizer` steps those of a unit as one.
    """
    if isinstance(optimizer, ShardedOptimizer) or update_unit(type(optimizer)) != "element":
        return optimizer.step
    if not any(isinstance(param, ShardedTensor) for group in optimizer.param_groups for param in group["params"]):
        return optimizer.step
    return partial(optim.Optimizer.profile_hook_step(_step_local), optimizer)  # with the user's hooks around it


@torch.no_grad()
def _step_local(optimizer: optim.Optimizer) -> None:
    """Step the local tensors of an optimizer's parameters. It is built anew each time: users load and change state."""
    inner = copy.copy(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    inner.param_groups = [
        {**group, "params": [local_of(param) for param in group["params"]]} for group in optimizer.param_groups
    ]
    inner.state = defaultdict(dict)
    for param in params:
        own = optimizer.state.get(param)
        if own:
            inner.state[local_of(param)] = {key: local_of(value) for key, value in own.items()}
    step_without_hooks(inner)
    for param in params:
        made = inner.state.get(local_of(param))
        if made:
            own = optimizer.state[param]
            own.update({key: _shown(x, param) for key, x in made.items() if local_of(own.get(key)) is not x})
    for group in inner.param_groups:
        if group.get("fused"):  # its kernels do not increment versions
            torch._C._increment_version(group["params"])
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn if no step came before them


def _shown(value: Any, param: Any) -> Any:
    is_like = isinstance(value, torch.Tensor) and isinstance(param, ShardedTensor) and value.dim() > 0
    if not is_like or value.shape != param._local.shape:
        return value
    return wrap(value, param._layout, None, param._group)


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
